//! What agents say on standard error, in files of bounded size and number. Reads nothing back.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tokio::io::AsyncReadExt;
use tokio::process::ChildStderr;
use tokio::task::spawn_blocking;

/// Half of what is kept of one execution, in bytes: the file and the one before it.
const HALF_BYTES: u64 = 512 << 10;

/// Most log files; the oldest go.
const LOGS_MAX: usize = 1_000;

/// Copies the agent's standard error to `path` until its end. The pipe is emptied even when the
/// log cannot be written, or the agent would block.
pub(super) async fn keep(mut errors: ChildStderr, path: PathBuf) {
    let shown = path.display().to_string();
    let opening = spawn_blocking(move || Log::open(path)).await;
    let mut log = opening.map_err(io::Error::other).and_then(|opened| opened);
    let mut buffer = vec![0; 16 << 10];
    while let Ok(length) = errors.read(&mut buffer).await
        && length > 0
    {
        let Ok(mut open) = log else { continue };
        let piece = buffer[..length].to_vec();
        let writing = spawn_blocking(move || open.write(&piece).map(|()| open)).await;
        log = writing
            .map_err(io::Error::other)
            .and_then(|written| written);
        if let Err(error) = &log {
            tracing::warn!(log = %shown, %error, "log of an agent is cut");
        }
    }
}

/// One log that is being written.
struct Log {
    path: PathBuf,
    file: File,
    size: u64,
}

impl Log {
    fn open(path: PathBuf) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            remove_old(directory)?;
        }
        Ok(Self {
            file: File::create(&path)?,
            path,
            size: 0,
        })
    }

    fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.size + piece.len() as u64 > HALF_BYTES {
            fs::rename(&self.path, self.path.with_extension("log.old"))?;
            self.file = File::create(&self.path)?;
            self.size = 0;
        }
        self.size += piece.len() as u64;
        self.file.write_all(piece)
    }
}

fn remove_old(directory: &Path) -> io::Result<()> {
    let mut logs = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        logs.push((entry.metadata()?.modified()?, entry.path()));
    }
    logs.sort();
    let surplus = (logs.len() + 1).saturating_sub(LOGS_MAX);
    for (_, path) in logs.into_iter().take(surplus) {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_its_end_within_bounds() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("1.log");
        let mut log = Log::open(path.clone()).expect("open");
        for number in 0..2_000u32 {
            log.write(format!("{number:1023}\n").as_bytes())
                .expect("write");
        }
        let old = fs::read(path.with_extension("log.old")).expect("old");
        let new = fs::read(&path).expect("new");
        assert!(old.len() + new.len() <= 2 * HALF_BYTES as usize);
        assert!(new.ends_with(b"1999\n") && old.len() >= 500_000);
    }

    #[test]
    fn old_logs_go() {
        let directory = tempfile::tempdir().expect("directory");
        for number in 0..LOGS_MAX + 5 {
            fs::write(directory.path().join(format!("{number}.log")), b"").expect("write");
        }
        drop(Log::open(directory.path().join("new.log")).expect("open"));
        assert_eq!(
            fs::read_dir(directory.path()).expect("list").count(),
            LOGS_MAX
        );
    }
}
