//! Errors: one variant for each status of libnf4, with its detail.

use std::ffi::CStr;

use nf4_sys as sys;

/// Says what went wrong. The text names the argument and its value.
///
/// Unless it is an [`Error::Cuda`] from a launch, nothing was enqueued and no output was
/// written.
///
/// ```
/// let spec = nf4::Spec::new(4, 64).blocksize(48);
/// let error = spec.sizes().unwrap_err();
/// assert!(matches!(error, nf4::Error::InvalidArgument(_)));
/// assert_eq!(error.detail(), "blocksize is 48; expected a power of two from 32 to 4096");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("invalid argument: {0}")]
    InvalidArgument(String),
    /// The library was built without CUDA.
    #[error("no CUDA: {0}")]
    NoCuda(String),
    /// No usable GPU: no driver, a driver that is too old, or no device.
    #[error("no usable GPU: {0}")]
    NoDevice(String),
    /// There is a GPU, but no kernel in this build runs on it.
    #[error("unsupported GPU: {0}")]
    UnsupportedDevice(String),
    /// The CUDA runtime returned an error, possibly from an earlier launch. If the launch
    /// enqueues several kernels, its outputs are unspecified.
    #[error("CUDA error: {0}")]
    Cuda(String),
    /// The library that was loaded is of a version with another ABI. None of its functions was
    /// called, except the one that returns its version.
    #[error("wrong version of libnf4: {0}")]
    WrongVersion(String),
    /// libnf4 cannot be loaded.
    #[cfg(feature = "dynamic-loading")]
    #[error(transparent)]
    NotLoaded(#[from] sys::LoadError),
    /// A status that this crate does not know.
    #[error("unknown status {status} of libnf4: {detail}")]
    Unknown {
        /// The `nf4_status`.
        status: i32,
        /// The detail.
        detail: String,
    },
    /// An error of the CUDA driver, met by cudarc.
    #[cfg(feature = "cudarc-core")]
    #[error("CUDA driver error: {0}")]
    Driver(#[from] cudarc::driver::DriverError),
}

/// A result with [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The detail: which argument, which value.
    pub fn detail(&self) -> &str {
        match self {
            #[cfg(feature = "dynamic-loading")]
            Error::NotLoaded(error) => error.detail(),
            Error::InvalidArgument(detail)
            | Error::NoCuda(detail)
            | Error::NoDevice(detail)
            | Error::UnsupportedDevice(detail)
            | Error::Cuda(detail)
            | Error::WrongVersion(detail)
            | Error::Unknown { detail, .. } => detail,
            #[cfg(feature = "cudarc-core")]
            Error::Driver(error) => error
                .error_string()
                .ok()
                .and_then(|text| text.to_str().ok())
                .unwrap_or("an error that the CUDA driver has no text for"),
        }
    }
}

/// The result of a call, made on this thread just before.
pub(crate) fn check(status: sys::nf4_status) -> Result<()> {
    if status == sys::NF4_STATUS_OK {
        return Ok(());
    }
    // SAFETY: never NULL, and valid until the next failure on this thread.
    let detail = unsafe { CStr::from_ptr(sys::nf4_last_error()) };
    let detail = detail.to_string_lossy().into_owned();
    Err(match status {
        sys::NF4_STATUS_INVALID_ARGUMENT => Error::InvalidArgument(detail),
        sys::NF4_STATUS_NO_CUDA => Error::NoCuda(detail),
        sys::NF4_STATUS_NO_DEVICE => Error::NoDevice(detail),
        sys::NF4_STATUS_UNSUPPORTED_DEVICE => Error::UnsupportedDevice(detail),
        sys::NF4_STATUS_CUDA_ERROR => Error::Cuda(detail),
        status => Error::Unknown { status, detail },
    })
}

/// An error of one of several products says which, counted from 0, as libnf4 does.
pub(crate) fn of_product(index: usize, error: Error) -> Error {
    match error {
        Error::InvalidArgument(detail) => {
            Error::InvalidArgument(format!("product {index}: {detail}"))
        }
        other => other,
    }
}

/// Converts a number to the type that the C interface takes.
pub(crate) fn convert<From, To>(name: &str, value: From) -> Result<To>
where
    From: Copy + std::fmt::Display,
    To: TryFrom<From>,
{
    To::try_from(value).map_err(|_| {
        let wanted = std::any::type_name::<To>();
        Error::InvalidArgument(format!("{name} is {value}; expected what fits {wanted}"))
    })
}

/// `threads` of the C interface: "at most", so a huge number is as good as the largest.
pub(crate) fn thread_count(threads: u32) -> i32 {
    i32::try_from(threads).unwrap_or(i32::MAX)
}

/// The product of two sizes. `name` is for the error.
pub(crate) fn product(name: &str, a: usize, b: usize) -> Result<usize> {
    a.checked_mul(b).ok_or_else(|| {
        Error::InvalidArgument(format!("{name} is {a} * {b}; expected what fits usize"))
    })
}

/// Checks that a buffer has exactly the length that the tensor needs.
pub(crate) fn check_length(name: &str, length: usize, expected: usize) -> Result<()> {
    if length == expected {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name} has {length} elements; expected {expected}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_variant() {
        type Variant = fn(String) -> Error;
        let variants: [(sys::nf4_status, Variant); 5] = [
            (sys::NF4_STATUS_INVALID_ARGUMENT, Error::InvalidArgument),
            (sys::NF4_STATUS_NO_CUDA, Error::NoCuda),
            (sys::NF4_STATUS_NO_DEVICE, Error::NoDevice),
            (sys::NF4_STATUS_UNSUPPORTED_DEVICE, Error::UnsupportedDevice),
            (sys::NF4_STATUS_CUDA_ERROR, Error::Cuda),
        ];
        assert_eq!(check(sys::NF4_STATUS_OK), Ok(()));
        let detail = crate::Spec::new(1, 1)
            .blocksize(5)
            .sizes()
            .unwrap_err()
            .detail()
            .to_owned();
        for (status, variant) in variants {
            assert_eq!(check(status), Err(variant(detail.clone())));
        }
        assert_eq!(check(99), Err(Error::Unknown { status: 99, detail }));
    }
}
