//! What a disk refuses, in the terms of the wire. Touches no file.

use std::fmt::Display;
use std::io;

use bafs_proto::{Error, ErrorCode};

/// The error of a store that does not do what it should. A full disk is a lack of space, which
/// whoever chooses the node must know; anything else may pass.
pub(crate) fn of_disk(doing: impl Display, error: &io::Error) -> Error {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpaceBytes,
        _ => ErrorCode::ServerFault,
    };
    Error::new(code, format!("{doing}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_a_lack_of_space() {
        let full = io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error());
        assert_eq!(of_disk("store", &full).code, ErrorCode::NoSpaceBytes);
        let broken = io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        assert_eq!(of_disk("store", &broken).code, ErrorCode::ServerFault);
    }
}
