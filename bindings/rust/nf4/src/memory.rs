//! The memory that the buffers of a call lie in: an operation is written once over all of them.

use std::ffi::c_void;

use nf4_sys as sys;
use sys::{nf4_status, nf4_stream};

use crate::error::{check, thread_count};
use crate::Result;

pub(crate) mod sealed {
    pub trait Sealed {}
    impl<S: Sealed + ?Sized> Sealed for &S {}
    impl<S: Sealed + ?Sized> Sealed for &mut S {}
}
use sealed::Sealed;

/// A kind of memory: [`Host`], [`Device`](crate::device::Device) for raw addresses on a GPU, or
/// `Cuda` for the buffers of the crate cudarc. All buffers of a call lie in one kind.
///
/// The last argument of an operation, `on`, converts into [`Memory::Call`].
pub trait Memory: Sealed + Sized + 'static {
    /// Says how a call runs: [`Threads`] on the host, or a [`LaunchOf`] on a GPU. A number of threads
    /// and a stream convert into them.
    type Call<'c>;

    /// Addresses for one call.
    #[doc(hidden)]
    type Access<'a>;

    /// Begins a call. A call on the host needs a workspace of `workspace_bytes`; a launch has the
    /// workspace that the caller gives, whose size libnf4 checks.
    #[doc(hidden)]
    fn access<'c: 'a, 'a>(call: Self::Call<'c>, workspace_bytes: usize) -> Self::Access<'a>;

    /// Calls the C function of this memory: the one on the host, which gets the number of threads, or
    /// the launch, which gets the stream.
    #[doc(hidden)]
    fn run(
        access: Self::Access<'_>,
        cpu: impl FnOnce(Scratch, i32) -> nf4_status,
        launch: impl FnOnce(Scratch, nf4_stream) -> nf4_status,
    ) -> Result<()>;
}

/// Says how a call on buffers in the memory `M` runs.
pub type Call<'c, M> = <M as Memory>::Call<'c>;
/// Addresses for one call on buffers in the memory `M`.
pub(crate) type Access<'a, M> = <M as Memory>::Access<'a>;

/// The workspace of a call.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Scratch {
    pub first: *mut c_void,
    pub bytes: usize,
}

/// A buffer that an operation reads: a slice, array or vector in host memory, a view or slice of
/// cudarc, a [`DeviceSlice`](crate::device::DeviceSlice), or a reference to one.
pub trait Read: Sealed {
    /// The type of its elements.
    type Element;
    /// The memory that it is in.
    type Memory: Memory;

    /// Returns the number of elements.
    fn length(&self) -> usize;

    /// The address for one call. `name` is for errors.
    #[doc(hidden)]
    fn address<'a>(
        &'a self,
        name: &str,
        access: &Access<'a, Self::Memory>,
    ) -> Result<*const Self::Element>;

    /// The elements, where the host can see them.
    #[doc(hidden)]
    fn on_host(&self) -> Option<&[Self::Element]> {
        None
    }
}

/// A buffer that an operation writes.
pub trait Write: Read {
    /// The address for one call.
    #[doc(hidden)]
    fn address_mut<'a>(
        &'a mut self,
        name: &str,
        access: &Access<'a, Self::Memory>,
    ) -> Result<*mut Self::Element>;
}

/// The address of a buffer that may be missing, which NULL stands for.
pub(crate) fn optional<'a, B: Read>(
    name: &str,
    buffer: Option<&'a B>,
    access: &Access<'a, B::Memory>,
) -> Result<*const B::Element> {
    buffer.map_or(Ok(std::ptr::null()), |buffer| buffer.address(name, access))
}

/// A reference is read as the buffer is.
macro_rules! read_through {
    ($reference:ty) => {
        impl<B: Read + ?Sized> Read for $reference {
            type Element = B::Element;
            type Memory = B::Memory;

            fn length(&self) -> usize {
                (**self).length()
            }

            fn address<'a>(
                &'a self,
                name: &str,
                access: &Access<'a, Self::Memory>,
            ) -> Result<*const Self::Element> {
                (**self).address(name, access)
            }

            fn on_host(&self) -> Option<&[Self::Element]> {
                (**self).on_host()
            }
        }
    };
}

read_through!(&B);
read_through!(&mut B);

impl<B: Write + ?Sized> Write for &mut B {
    fn address_mut<'a>(
        &'a mut self,
        name: &str,
        access: &Access<'a, Self::Memory>,
    ) -> Result<*mut Self::Element> {
        (**self).address_mut(name, access)
    }
}

/// Host memory.
#[derive(Debug, Clone, Copy)]
pub enum Host {}

/// Says how a call on the host runs. A number of threads converts into it.
#[derive(Debug, Default)]
pub struct Threads<'c> {
    threads: u32,
    workspace: Option<&'c mut Workspace>,
}

impl<'c> Threads<'c> {
    /// Uses at most `threads` threads; 0 means one for each processor. No bit of a result depends on the
    /// number.
    pub const fn new(threads: u32) -> Self {
        Threads {
            threads,
            workspace: None,
        }
    }

    /// Returns the same with a workspace. [`quantize_into`](crate::quantize_into) uses it and does not
    /// allocate one; the other operations need none and ignore it.
    pub fn workspace(self, workspace: &'c mut Workspace) -> Self {
        Threads {
            workspace: Some(workspace),
            ..self
        }
    }
}

impl From<u32> for Threads<'_> {
    fn from(threads: u32) -> Self {
        Threads::new(threads)
    }
}

/// The workspace of quantize on the host, for several calls. Flat weights need none.
#[derive(Debug, Default)]
pub struct Workspace {
    chunks: Vec<Chunk>,
}

/// libnf4 requires a workspace aligned to 16 bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
struct Chunk([u8; 16]);

impl Workspace {
    /// Makes an empty workspace, which grows when a call needs more.
    pub fn new() -> Self {
        Self::default()
    }

    fn grow(&mut self, bytes: usize) {
        let chunks = bytes.div_ceil(size_of::<Chunk>());
        if self.chunks.len() < chunks {
            self.chunks.resize(chunks, Chunk([0; 16]));
        }
    }
}

#[doc(hidden)]
#[derive(Debug)]
pub struct HostAccess<'a> {
    threads: i32,
    own: Workspace,
    given: Option<&'a mut Workspace>,
}

impl Sealed for Host {}

impl Memory for Host {
    type Call<'c> = Threads<'c>;
    type Access<'a> = HostAccess<'a>;

    fn access<'c: 'a, 'a>(call: Threads<'c>, workspace_bytes: usize) -> HostAccess<'a> {
        let mut access = HostAccess {
            threads: thread_count(call.threads),
            own: Workspace::new(),
            given: call.workspace,
        };
        let workspace = access.given.as_deref_mut().unwrap_or(&mut access.own);
        workspace.grow(workspace_bytes);
        access
    }

    fn run(
        access: HostAccess<'_>,
        cpu: impl FnOnce(Scratch, i32) -> nf4_status,
        _launch: impl FnOnce(Scratch, nf4_stream) -> nf4_status,
    ) -> Result<()> {
        let mut own = access.own;
        let workspace = access.given.unwrap_or(&mut own);
        let scratch = Scratch {
            first: workspace.chunks.as_mut_ptr().cast(),
            bytes: size_of_val(&workspace.chunks[..]),
        };
        check(cpu(scratch, access.threads))
    }
}

/// Buffers in host memory: of `$element`, whose elements `$slice` and `$slice_mut` give.
macro_rules! host_buffer {
    ([$($generics:tt)*] $buffer:ty, $element:ty, $slice:expr, $slice_mut:expr) => {
        impl<$($generics)*> Sealed for $buffer {}

        impl<$($generics)*> Read for $buffer {
            type Element = $element;
            type Memory = Host;

            fn length(&self) -> usize {
                $slice(self).len()
            }

            fn address<'a>(&'a self, _: &str, _: &HostAccess<'a>) -> Result<*const $element> {
                Ok($slice(self).as_ptr())
            }

            fn on_host(&self) -> Option<&[$element]> {
                Some($slice(self))
            }
        }

        impl<$($generics)*> Write for $buffer {
            fn address_mut<'a>(&'a mut self, _: &str, _: &HostAccess<'a>) -> Result<*mut $element> {
                Ok($slice_mut(self).as_mut_ptr())
            }
        }
    };
}

host_buffer!([T][T], T, std::convert::identity, std::convert::identity);
host_buffer!([T, const N: usize] [T; N], T, <[T; N]>::as_slice, <[T; N]>::as_mut_slice);
host_buffer!([T, const N: usize] Box<[T; N]>, T, boxed, boxed_mut);
host_buffer!([T] Vec<T>, T, Vec::as_slice, Vec::as_mut_slice);
host_buffer!([] f32, f32, std::slice::from_ref, std::slice::from_mut);

#[allow(clippy::borrowed_box)]
fn boxed<T, const N: usize>(array: &Box<[T; N]>) -> &[T] {
    &array[..]
}

fn boxed_mut<T, const N: usize>(array: &mut Box<[T; N]>) -> &mut [T] {
    &mut array[..]
}

/// Says how a launch on a GPU runs: the stream, and a workspace for operations that need one.
/// A stream converts into it. The aliases `nf4::cuda::Launch` and
/// [`device::Launch`](crate::device::Launch) have the types of a memory.
#[derive(Debug, Clone, Copy)]
pub struct LaunchOf<Stream, Workspace> {
    pub(crate) stream: Stream,
    pub(crate) workspace: Option<Workspace>,
}

impl<Stream, Workspace> LaunchOf<Stream, Workspace> {
    /// Makes a launch without a workspace.
    pub const fn new(stream: Stream) -> Self {
        LaunchOf {
            stream,
            workspace: None,
        }
    }

    /// Returns the same with a workspace, which is aligned to 16 bytes. The documentation of an operation
    /// names the function that returns the bytes it needs. If they are 0, or if it names no function,
    /// the operation needs no workspace and ignores it.
    pub fn workspace(self, workspace: Workspace) -> Self {
        LaunchOf {
            workspace: Some(workspace),
            ..self
        }
    }
}
