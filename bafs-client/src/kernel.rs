//! The one system call of this crate that no safe library wraps; holds no policy.
#![allow(unsafe_code)]

use std::io;

use nix::libc;

/// Marks every open descriptor from `first` upwards as closed on the next `exec`.
///
/// Nothing is closed in this process, so descriptors owned by other code stay valid.
pub(crate) fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: the call takes three integers and touches no memory of ours. With CLOEXEC it
    // closes no descriptor, so no owner of a descriptor can observe a change.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
