//! Where programs of the same user find a page: a file with its address and a token, which only the
//! user can read, and which ends with the page.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

/// For the owner only.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// What a page shows.
#[derive(Debug, Clone, Copy)]
pub(super) enum PageSubject<'p> {
    /// A run, by its journal.
    Journal(&'p Path),
    /// A service, by its state.
    State(&'p Path),
}

/// The file, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionFile {
    path: PathBuf,
}

impl ConnectionFile {
    /// Writes the file of a page at an address.
    ///
    /// # Errors
    /// If the user has no directory that is safe.
    pub(super) fn create(url: &str, token: &str, subject: PageSubject<'_>) -> Result<Self> {
        let directory = runtime_directory()?;
        let pid = std::process::id();
        let path = directory.join(format!("page-{pid}.json"));
        // One of a process before that had the same number.
        let _ = fs::remove_file(&path);
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(FILE_MODE)
            .open(&path)?;
        let mut content = json!({"url": url, "token": token, "pid": pid});
        match subject {
            PageSubject::Journal(path) => content["journal"] = json!(path),
            PageSubject::State(path) => content["state"] = json!(path),
        }
        file.write_all(content.to_string().as_bytes())?;
        Ok(Self { path })
    }
}

impl Drop for ConnectionFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The directory where programs of a user find each other, which nobody else may use.
fn runtime_directory() -> Result<PathBuf> {
    let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|value| !value.is_empty());
    let directory = match named {
        Some(named) => PathBuf::from(named).join("bafs"),
        None => std::env::temp_dir().join(format!("bafs-{}", nix::unistd::getuid())),
    };
    create_private_directory(&directory)
        .with_context(|| format!("cannot use {}", directory.display()))?;
    Ok(directory)
}

/// Creates a directory that only the user can use, or rejects one that others can.
fn create_private_directory(directory: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    builder
        .recursive(true)
        .mode(DIRECTORY_MODE)
        .create(directory)?;
    let found = fs::symlink_metadata(directory)?;
    let is_own = found.uid() == nix::unistd::getuid().as_raw();
    ensure!(
        found.is_dir() && is_own && found.mode() & 0o077 == 0,
        "it is not a directory that only you can use; remove it, or set XDG_RUNTIME_DIR"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn directory_of_others_is_rejected() {
        let directory = tempfile::tempdir().expect("a directory");
        let own = directory.path().join("own");
        create_private_directory(&own).expect("it is created");
        create_private_directory(&own).expect("it is there");
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).expect("it is opened");
        assert!(create_private_directory(&own).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).expect("it is linked");
        assert!(create_private_directory(&link).is_err());
    }
}
