//! One run of a workflow at a time: a file beside the journal that the kernel unlocks when the
//! process ends, however it ends. It says who holds it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::logs::sibling_path;

/// A file that its holder has just removed is made anew so often.
const TRIES_MAX: u32 = 100;

/// Bytes that are read of who holds a lock.
const HOLDER_BYTES_MAX: u64 = 1_000;

/// The right to run a workflow; it ends with this value, or with the process.
#[derive(Debug)]
pub(super) struct RunLock {
    path: PathBuf,
    _file: File,
}

impl RunLock {
    /// Takes the lock of a journal. Nothing where no file can be made there: the journal will say
    /// why.
    ///
    /// # Errors
    /// Another process has it.
    pub(super) fn acquire(journal: &Path) -> Result<Option<Self>> {
        let path = sibling_path(journal, "lock");
        let options = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.open(&path)
        };
        for _ in 0..TRIES_MAX {
            let Ok(mut file) = options() else {
                return Ok(None);
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    bail!("{}", describe_holder(&mut file, journal));
                }
                // Without locks the journal will say so.
                Err(TryLockError::Error(_)) => return Ok(None),
            }
            let is_current = fs::metadata(&path)
                .and_then(|named| Ok(named.ino() == file.metadata()?.ino()))
                .unwrap_or(false);
            if is_current {
                let failed = || format!("cannot write {}", path.display());
                write_holder(&mut file).with_context(failed)?;
                return Ok(Some(Self { path, _file: file }));
            }
        }
        bail!(
            "cannot lock {}: others lock it all the time",
            path.display()
        )
    }
}

/// Whether a process runs the workflow with this journal.
pub(crate) fn is_run_locked(journal: &Path) -> bool {
    let Ok(file) = File::open(sibling_path(journal, "lock")) else {
        return false;
    };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Before it is unlocked: whoever opened it meanwhile sees that it is another one.
        let _ = fs::remove_file(&self.path);
    }
}

fn write_holder(file: &mut File) -> std::io::Result<()> {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let text = format!(
        "process {} on host {}\n",
        std::process::id(),
        host.to_string_lossy()
    );
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(text.as_bytes())
}

fn describe_holder(file: &mut File, journal: &Path) -> String {
    let mut text = String::new();
    let read = file.take(HOLDER_BYTES_MAX).read_to_string(&mut text);
    let holder = match (read, text.trim()) {
        (Ok(_), holder) if !holder.is_empty() => holder.to_owned(),
        _ => "another process".to_owned(),
    };
    format!(
        "{holder} runs this workflow with the journal {}; wait until it ends, or stop it",
        journal.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_run_names_the_holder() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("w.journal");
        let held = RunLock::acquire(&journal).expect("free").expect("a file");
        let refused = RunLock::acquire(&journal).expect_err("it is held");
        let told = refused.to_string();
        let expected = format!("process {} on host ", std::process::id());
        assert!(told.starts_with(&expected), "{told}");
        drop(held);
        assert!(!directory.path().join("w.journal.lock").exists());
        assert!(RunLock::acquire(&journal).expect("free").is_some());
    }

    #[test]
    fn stale_lock_file_refuses_nobody() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("w.journal");
        let stale = directory.path().join("w.journal.lock");
        fs::write(stale, "process 1 on host gone\n").expect("write");
        assert!(RunLock::acquire(&journal).expect("free").is_some());
    }
}
