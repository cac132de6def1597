//! The library and the machine: versions, tables, CPU and GPU.

use std::ffi::{c_char, CStr};
use std::sync::OnceLock;

use nf4_sys as sys;

use crate::error::check;
use crate::format::{CODEBOOK_SIZE, SCALE_CODE_SIZE};
use crate::{Error, Format, Result};

/// A version of libnf4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    /// The version of the header from which this crate was made.
    const HEADER: Version = Version {
        major: sys::NF4_VERSION_MAJOR as u32,
        minor: sys::NF4_VERSION_MINOR as u32,
        patch: sys::NF4_VERSION_PATCH as u32,
    };

    /// Does a library of this version have what a header of version `header` declares? A minor
    /// version only adds to the ABI (docs/abi.md).
    fn serves(self, header: Version) -> bool {
        self.major == header.major && self.minor >= header.minor
    }

    fn check(self) -> Result<()> {
        if self.serves(Self::HEADER) {
            return Ok(());
        }
        let Version {
            major,
            minor,
            patch,
        } = self;
        Err(Error::WrongVersion(format!(
            "it is {major}.{minor}.{patch}; this crate needs {}.{}",
            Self::HEADER.major,
            Self::HEADER.minor
        )))
    }
}

/// Has the library that was loaded the ABI that this crate calls?
pub(crate) fn check_version() -> Result<()> {
    #[cfg(feature = "dynamic-loading")]
    sys::load()?;
    static CHECKED: OnceLock<Result<()>> = OnceLock::new();
    CHECKED.get_or_init(|| version().check()).clone()
}

/// Returns the version of the library that is loaded.
pub fn version() -> Version {
    // SAFETY: no arguments.
    let number = unsafe { sys::nf4_version() }.unsigned_abs();
    Version {
        major: number / 10_000,
        minor: number / 100 % 100,
        patch: number % 100,
    }
}

/// Returns the same as text, such as `0.1.0`.
pub fn version_string() -> &'static str {
    // SAFETY: no arguments; the text is static.
    unsafe { static_text(sys::nf4_version_string()) }
}

/// Tells how the library was built, in pairs of a key and a value.
///
/// ```
/// assert!(nf4::build_info().any(|(key, _)| key == "compiler"));
/// ```
pub fn build_info() -> impl Iterator<Item = (&'static str, &'static str)> {
    // SAFETY: no arguments; the text is static.
    let text = unsafe { static_text(sys::nf4_build_info()) };
    text.lines().filter_map(|line| line.split_once(": "))
}

/// Returns the name of the CPU kernels that this machine runs: `avx512bf16`, `avx512`, `avx2`,
/// `neonbf16`, `neon` or `scalar`. Later versions may have others.
pub fn cpu_variant() -> &'static str {
    // SAFETY: no arguments; the text is static.
    unsafe { static_text(sys::nf4_cpu_variant()) }
}

/// Returns the codebook of a format: 16 floats, indexed by code.
///
/// ```
/// let nf4 = nf4::codebook(nf4::Format::Nf4);
/// assert_eq!((nf4[0], nf4[7], nf4[15]), (-1.0, 0.0, 1.0));
/// ```
///
/// # Panics
/// If the library that was loaded is older than the format.
pub fn codebook(format: Format) -> &'static [f32; CODEBOOK_SIZE] {
    // SAFETY: the pointer is to 16 static floats; it is NULL for a format that the library lacks.
    let entries = unsafe {
        sys::nf4_codebook(format.as_raw())
            .cast::<[f32; CODEBOOK_SIZE]>()
            .as_ref()
    };
    entries.expect("libnf4 has this format")
}

/// Returns the scale code of bitsandbytes: 256 floats, ascending.
pub fn scale_code() -> &'static [f32; SCALE_CODE_SIZE] {
    // SAFETY: the pointer is to 256 static floats.
    unsafe { &*sys::nf4_scale_code().cast() }
}

/// A GPU, and whether this library can use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// An error if the GPU cannot be used, which says why. The other fields have what is known in
    /// either case.
    pub status: Result<()>,
    /// GPUs that the CUDA driver shows.
    pub device_count: i32,
    /// The compute capability, major * 10 + minor: 90 for an H200.
    pub compute_capability: i32,
    /// The number of multiprocessors.
    pub multiprocessors: i32,
    /// CUDA version of the driver, 13000 for 13.0; 0 if there is none.
    pub driver_version: i32,
    /// CUDA version that the library was built with.
    pub runtime_version: i32,
    /// Bytes of memory of the GPU.
    pub memory_bytes: i64,
    /// Its name.
    pub name: String,
    /// The kernels that would run, such as `sm90`.
    pub dequant_variant: String,
    /// Bytes of shared memory that a thread block may have.
    pub shared_memory_bytes: i32,
    /// True if libnf4's products were timed on GPUs of this kind. If not, the answers of
    /// [`Spec::matmul_path`](crate::Spec::matmul_path) are presumed.
    pub timed: bool,
}

impl DeviceInfo {
    /// Returns whether this library can use the GPU.
    pub fn usable(&self) -> bool {
        self.status.is_ok()
    }
}

/// Checks whether this library can use the GPU with index `device`. It initialises CUDA and loads the
/// kernels, which may take long, so that later launches need not.
///
/// ```
/// let gpu = nf4::device_info(0);
/// match gpu.status {
///     Ok(()) => println!("{}: {}", gpu.name, gpu.dequant_variant),
///     Err(reason) => println!("{reason}"),
/// }
/// ```
pub fn device_info(device: i32) -> DeviceInfo {
    let mut info = sys::nf4_device {
        struct_size: size_of::<sys::nf4_device>(),
        device_count: 0,
        compute_capability: 0,
        multiprocessors: 0,
        driver_version: 0,
        runtime_version: 0,
        reserved: 0,
        memory_bytes: 0,
        name: [0; 256],
        dequant_variant: [0; 32],
        shared_memory_bytes: 0,
        timed: 0,
    };
    let status = check_version().and_then(|()| {
        // SAFETY: the struct lives through the call and its struct_size is set.
        check(unsafe { sys::nf4_device_info(device, &mut info) })
    });
    DeviceInfo {
        status,
        device_count: info.device_count,
        compute_capability: info.compute_capability,
        multiprocessors: info.multiprocessors,
        driver_version: info.driver_version,
        runtime_version: info.runtime_version,
        memory_bytes: info.memory_bytes,
        name: array_text(&info.name),
        dequant_variant: array_text(&info.dequant_variant),
        shared_memory_bytes: info.shared_memory_bytes,
        timed: info.timed != 0,
    }
}

/// The text of an array of characters, up to the first 0 or to its end.
fn array_text(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text
        .iter()
        .map(|c| *c as u8)
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// # Safety
/// `text` is a static C string.
unsafe fn static_text(text: *const c_char) -> &'static str {
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().expect("the texts of libnf4 are ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn version(major: u32, minor: u32, patch: u32) -> Version {
        Version {
            major,
            minor,
            patch,
        }
    }

    #[test]
    fn a_library_of_another_abi_is_refused() {
        let header = version(0, 1, 0);
        for good in [version(0, 1, 0), version(0, 1, 9), version(0, 2, 0)] {
            assert!(good.serves(header), "{good:?}");
        }
        for bad in [version(0, 0, 9), version(1, 1, 0)] {
            assert!(!bad.serves(header), "{bad:?}");
        }
        let stable = version(1, 2, 0);
        assert!(version(1, 2, 5).serves(stable) && version(1, 3, 0).serves(stable));
        assert!(!version(1, 1, 9).serves(stable) && !version(2, 2, 0).serves(stable));
    }

    #[test]
    fn the_refusal_names_both_versions() {
        let Version { major, minor, .. } = Version::HEADER;
        let detail = format!("it is {}.0.7; this crate needs {major}.{minor}", major + 1);
        let refused = version(major + 1, 0, 7).check();
        assert_eq!(refused, Err(Error::WrongVersion(detail)));
        assert_eq!(check_version(), Ok(()));
    }
}
