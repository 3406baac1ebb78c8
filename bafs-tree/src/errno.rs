//! Conversion of system call errors to the wire's errno; no policy.

use std::ffi::CString;

use bafs_proto::file_op::Errno;

/// Result of a step of an operation.
pub(crate) type Outcome<T> = Result<T, Errno>;

macro_rules! errnos {
    ($($name:ident)*) => {
        $(pub(crate) const $name: Errno = Errno(rustix::io::Errno::$name.raw_os_error());)*
    };
}

pub(crate) const E2BIG: Errno = Errno(rustix::io::Errno::TOOBIG.raw_os_error());
errnos! {
    BADF EXIST INVAL IO ISDIR LOOP MFILE NFILE NOENT NOSPC NOTDIR NXIO OPNOTSUPP PERM ROFS STALE
    ACCESS RANGE FBIG BUSY NODATA
}

/// The errno of a failed system call. A process that ran out of descriptors is, to the caller, a
/// full table of the system that serves it.
pub(crate) fn from_host(error: rustix::io::Errno) -> Errno {
    match error {
        rustix::io::Errno::MFILE => NFILE,
        other => Errno(other.raw_os_error()),
    }
}

/// The errno of the system call that this thread made last.
pub(crate) fn from_last_os_error() -> Errno {
    let error = std::io::Error::last_os_error();
    from_host(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO))
}

/// A single component of a path, fit for a system call: nothing that leaves its directory.
pub(crate) fn checked_name(name: &[u8]) -> Outcome<CString> {
    if matches!(name, b"" | b"." | b"..") || name.contains(&b'/') {
        return Err(INVAL);
    }
    CString::new(name).map_err(|_| INVAL)
}
