//! The file of this program, which others may move or replace while it runs. Starts nothing.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use anyhow::{Context, Result};

/// The file, for a process that runs what was there before.
pub(crate) const PROGRAM_VARIABLE: &str = "BAFS_PROGRAM_FILE";

/// What the kernel adds to the path of a program whose file was replaced.
const REPLACED_SUFFIX: &[u8] = b" (deleted)";

/// Where this process found its program when it began. Later the kernel names the place to which
/// that file was moved.
static PROGRAM_FILE: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let told = env::var_os(PROGRAM_VARIABLE).map(PathBuf::from);
    told.or_else(|| env::current_exe().ok().map(strip_replaced))
});

/// Notes the file of this program. Called when the process begins.
pub(crate) fn note_program_file() {
    LazyLock::force(&PROGRAM_FILE);
}

/// The file from which this program was started; it may be another program by now.
pub(crate) fn program_file() -> Result<&'static Path> {
    let path = PROGRAM_FILE.as_deref();
    path.context("cannot find the bafs program")
}

fn strip_replaced(path: PathBuf) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    match bytes.strip_suffix(REPLACED_SUFFIX) {
        Some(rest) => OsString::from_vec(rest.to_vec()).into(),
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaced_file_keeps_its_path() {
        assert_eq!(
            strip_replaced("/usr/bin/bafs (deleted)".into()),
            PathBuf::from("/usr/bin/bafs")
        );
        assert_eq!(
            strip_replaced("/usr/bin/bafs".into()),
            PathBuf::from("/usr/bin/bafs")
        );
    }
}
