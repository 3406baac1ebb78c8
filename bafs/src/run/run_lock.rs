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

/// Journals that a run of this workflow file locks: its own, and that of the file which a symbolic
/// link of this name leads to. There the same results would come to the same places, at least in a
/// cluster that stays; without one, the directory of the link is the home.
pub(super) fn journals_to_lock(
    workflow: &Path,
    journal: &Path,
    has_own_journal: bool,
    is_on_cluster: bool,
) -> Vec<PathBuf> {
    let is_link = fs::symlink_metadata(workflow).is_ok_and(|found| found.is_symlink());
    let directory = match workflow.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let real = workflow.canonicalize().ok().filter(|real| {
        let is_beside = || directory.canonicalize().ok().as_deref() == real.parent();
        is_link && !has_own_journal && (is_on_cluster || is_beside())
    });
    let linked = real.map(|real| sibling_path(&real, "journal"));
    [journal.to_owned()].into_iter().chain(linked).collect()
}

impl RunLock {
    /// Takes the locks of all these journals.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub(super) fn acquire_all(journals: &[PathBuf]) -> Result<Vec<Self>> {
        let locks = journals.iter().map(|journal| Self::acquire(journal));
        let locks: Result<Vec<Option<Self>>> = locks.collect();
        Ok(locks?.into_iter().flatten().collect())
    }

    /// Who has the lock of a journal, if anybody does.
    pub(super) fn find_holder(journal: &Path) -> Option<String> {
        let mut file = File::open(sibling_path(journal, "lock")).ok()?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Some(read_holder(&mut file)),
            _ => None,
        }
    }

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
    format!(
        "{} runs this workflow with the journal {}; wait until it ends, or stop it",
        read_holder(file),
        journal.display()
    )
}

fn read_holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(HOLDER_BYTES_MAX).read_to_string(&mut text);
    match (read, text.trim()) {
        (Ok(_), holder) if !holder.is_empty() => holder.to_owned(),
        _ => "another process".to_owned(),
    }
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
    fn links_of_a_workflow_share_its_lock() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("other")).expect("mkdir");
        fs::write(at("w.bafs"), "").expect("write");
        for name in ["l.bafs", "other/m.bafs"] {
            std::os::unix::fs::symlink(at("w.bafs"), at(name)).expect("link");
        }
        let lock = |name: &str, has_own_journal, is_on_cluster| {
            let journal = at(&format!("{name}.journal"));
            let place = at(name);
            let journals = journals_to_lock(&place, &journal, has_own_journal, is_on_cluster);
            RunLock::acquire_all(&journals)
        };
        let held = lock("w.bafs", false, false).expect("free");
        assert_eq!(held.len(), 1);
        lock("l.bafs", false, false).expect_err("the same workflow beside it");
        lock("other/m.bafs", false, true).expect_err("the same homes");
        lock("other/m.bafs", false, false).expect("a home of its own");
        lock("l.bafs", true, false).expect("a journal that the user named");
        drop(held);
        let held = lock("l.bafs", false, false).expect("free");
        assert_eq!(held.len(), 2);
        lock("w.bafs", false, false).expect_err("its link runs");
    }

    #[test]
    fn holder_of_a_lock_is_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let journal = directory.path().join("w.journal");
        assert_eq!(RunLock::find_holder(&journal), None);
        let held = RunLock::acquire(&journal).expect("free");
        let holder = RunLock::find_holder(&journal).expect("this process");
        let expected = format!("process {} on host ", std::process::id());
        assert!(holder.starts_with(&expected), "{holder}");
        drop(held);
        assert_eq!(RunLock::find_holder(&journal), None);
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
