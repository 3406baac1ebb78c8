//! Files that users name as input: regular ones of a bounded size, so that none is waited for and
//! none fills the memory. It does not know what they say.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Opens a file for reading. A pipe, a directory or a device is refused: nobody may ever write into
/// the pipe, and some devices have no end.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    let failed = || format!("cannot read {}", path.display());
    // A pipe would be waited for as soon as it is opened.
    if !path.metadata().with_context(failed)?.is_file() {
        bail!(
            "{} is not a regular file; copy its content into one",
            path.display()
        );
    }
    File::open(path).with_context(failed)
}

/// Reads a text of so many bytes at most, a whole number of MiB.
pub(crate) fn read_text(path: &Path, bytes_max: usize) -> Result<String> {
    let shown = path.display();
    let mut bytes = Vec::new();
    let read = open_regular(path)?
        .take(bytes_max as u64 + 1)
        .read_to_end(&mut bytes);
    read.with_context(|| format!("cannot read {shown}"))?;
    if bytes.len() > bytes_max {
        bail!(
            "{shown} is larger than the limit of {} MiB",
            bytes_max >> 20
        );
    }
    String::from_utf8(bytes).or_else(|error| {
        let right = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + right.iter().filter(|&&byte| byte == b'\n').count();
        bail!("{shown}: line {line} is not text in UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const MIB: usize = 1 << 20;

    fn open_error(path: &Path) -> String {
        format!("{:#}", read_text(path, MIB).unwrap_err())
    }

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        for path in [directory.path(), Path::new("/dev/zero"), &socket] {
            let said = open_error(path);
            assert!(said.contains("is not a regular file"), "{said}");
        }
        let said = open_error(&directory.path().join("none"));
        assert!(
            said.contains("cannot read") && said.contains("No such file"),
            "{said}"
        );
    }

    #[test]
    fn oversized_files_are_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        assert_eq!(read_text(file.path(), MIB).unwrap().len(), 1 << 20);
        file.as_file().set_len((1 << 20) + 1).unwrap();
        let said = open_error(file.path());
        assert!(said.contains("is larger than the limit of 1 MiB"), "{said}");
    }

    #[test]
    fn non_utf8_text_is_named_by_its_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"fine\nfine\nna\xefve\n").unwrap();
        let said = open_error(file.path());
        assert!(said.ends_with(": line 3 is not text in UTF-8"), "{said}");
    }
}
