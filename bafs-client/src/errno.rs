//! The one table from protocol errors to what a job's system call sees. Reports nothing itself.

use bafs_proto::ErrorCode;
use bafs_proto::file_op::Errno;
use nix::libc;

/// Errnos above this are the kernel's own: it refuses a reply that carries one, and the caller
/// would wait for ever.
const ERRNO_MAX: i32 = 511;

/// What a system call answers when the protocol failed with `code`.
pub(crate) fn errno_of(code: ErrorCode) -> Errno {
    use ErrorCode as Code;
    Errno(match code {
        // The retries are over when this is asked: the environment failed, and EIO is what a
        // program takes as final. EAGAIN or ETIMEDOUT would make some programs try for ever.
        Code::Unreachable
        | Code::HomeUnreachable
        | Code::NodeLeaving
        | Code::DeadlineExceeded
        | Code::Busy
        | Code::InProgress
        | Code::SessionUnknown
        | Code::ServerFault => libc::EIO,
        Code::VolumeLost | Code::SourceChanged | Code::Fenced | Code::StoreLost => libc::EIO,
        Code::TokenInvalid
        | Code::TokenExpired
        | Code::RightMissing
        | Code::LeaseHeld
        | Code::PeerRefused => libc::EACCES,
        // Both ends are BAFS: whatever they misunderstand is not the job's fault.
        Code::Malformed
        | Code::VersionMismatch
        | Code::Conflict
        | Code::WrongState
        | Code::TooLarge
        | Code::TemporaryFull
        | Code::MemoryExceeded
        | Code::RuntimeExceeded
        | Code::UploadFenced => libc::EIO,
        Code::NotFound => libc::ENOENT,
        Code::Unsupported => libc::EOPNOTSUPP,
        // Damaged bytes must never reach the program, as bad as that is for it.
        Code::DigestMismatch => libc::EIO,
        Code::BadPath => libc::EINVAL,
        Code::NoSpaceBytes | Code::NoSpaceFiles => libc::ENOSPC,
    })
}

/// What the kernel may be told when a tree answered with `errno`.
///
/// `ENOSYS` would switch the operation off for the whole mount, and a number that the kernel
/// does not accept would leave the caller waiting.
pub(crate) fn kernel_safe_errno(errno: Errno) -> Errno {
    match errno.0 {
        libc::ENOSYS => Errno(libc::EOPNOTSUPP),
        1..=ERRNO_MAX => errno,
        _ => Errno(libc::EIO),
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ErrorClass;

    use super::*;

    #[test]
    fn every_error_code_maps_to_fitting_errno() {
        for &code in ErrorCode::ALL {
            let errno = errno_of(code).0;
            let fits = match code.class() {
                ErrorClass::Transient | ErrorClass::VolumeLost => errno == libc::EIO,
                ErrorClass::Denied => errno == libc::EACCES,
                ErrorClass::NoSpace => errno == libc::ENOSPC,
                ErrorClass::Invalid => {
                    [libc::EIO, libc::ENOENT, libc::EOPNOTSUPP, libc::EINVAL].contains(&errno)
                }
            };
            assert!(fits, "{code:?} became {errno}");
            assert_eq!(kernel_safe_errno(Errno(errno)), Errno(errno), "{code:?}");
        }
    }

    #[test]
    fn errnos_invalid_for_the_kernel_become_eio() {
        for bad in [0, -5, 512, 4096, i32::MIN, i32::MAX] {
            assert_eq!(kernel_safe_errno(Errno(bad)), Errno(libc::EIO));
        }
        assert_eq!(
            kernel_safe_errno(Errno(libc::ENOSYS)),
            Errno(libc::EOPNOTSUPP)
        );
        assert_eq!(kernel_safe_errno(Errno(libc::EDQUOT)), Errno(libc::EDQUOT));
    }
}
