//! Files without a name that a job holds open in its temporary directories: they take space that no
//! walk finds. Read from `/proc`, if this user may inspect the processes of the job.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::job_processes::find_descendants;

/// The job's own directories, by the paths in its name space.
const PRIVATE: [&str; 2] = ["/tmp", "/var/tmp"];

/// The kernel's suffix of the path of an open, unlinked file.
const DELETED: &[u8] = b" (deleted)";

/// Where a job may hold such files.
#[derive(Debug, Clone)]
pub(super) struct UnlinkedFiles {
    /// The agent, from which all processes of the job descend; `None` when it has ended.
    agent: Option<u32>,
    /// Paths of the job outside its own temporary directories: volumes, and directories shared with
    /// the host.
    others: Vec<PathBuf>,
}

impl UnlinkedFiles {
    pub(super) fn of_agent(agent: Option<u32>, others: Vec<PathBuf>) -> Self {
        Self { agent, others }
    }

    /// Bytes and files of this device that have no name and are open. Blocks.
    pub(super) fn measure(&self, device: u64) -> (u64, u64) {
        let mut seen = BTreeSet::new();
        let mut bytes = 0;
        for process in self.processes() {
            let Ok(open) = fs::read_dir(format!("/proc/{process}/fd")) else {
                continue;
            };
            for descriptor in open.flatten() {
                let link = descriptor.path();
                // A file system whose server hangs is asked nothing.
                if !fs::read_link(&link).is_ok_and(|path| self.is_private(&path)) {
                    continue;
                }
                let Ok(found) = fs::metadata(&link) else {
                    continue;
                };
                if found.nlink() == 0 && found.dev() == device && seen.insert(found.ino()) {
                    bytes += found.blocks() * 512;
                }
            }
        }
        (bytes, seen.len() as u64)
    }

    fn is_private(&self, path: &Path) -> bool {
        let Some(path) = path.as_os_str().as_bytes().strip_suffix(DELETED) else {
            return false;
        };
        let path = Path::new(OsStr::from_bytes(path));
        PRIVATE.iter().any(|private| path.starts_with(private))
            && !self.others.iter().any(|other| path.starts_with(other))
    }

    /// The agent and all that descend from it.
    fn processes(&self) -> Vec<u32> {
        self.agent.map_or_else(Vec::new, find_descendants)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn open_files_without_a_name_are_counted() {
        let directory = tempfile::tempdir_in("/tmp").expect("directory");
        let device = directory.path().metadata().expect("directory").dev();
        let path = directory.path().join("f");
        let script = r#"exec 9>"$1"; rm "$1"; head -c 1000000 /dev/zero >&9; echo; read wait"#;
        // A child of a child, which two processes hold open.
        let mut job = Command::new("sh")
            .args(["-c", r#"sh -c "$0" sh "$1"; true"#, script])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = job.stdout.take().expect("a pipe");
        io::BufRead::read_line(&mut io::BufReader::new(said), &mut String::new()).expect("read");
        let measure = |others: &[&Path], device| {
            let others = others.iter().map(|path| path.to_path_buf()).collect();
            UnlinkedFiles::of_agent(Some(job.id()), others).measure(device)
        };
        let (bytes, files) = measure(&[], device);
        assert!(
            files == 1 && (1_000_000..1_100_000).contains(&bytes),
            "{bytes}"
        );
        assert_eq!(measure(&[directory.path()], device), (0, 0), "a volume");
        assert_eq!(measure(&[], device + 1), (0, 0), "another file system");
        job.stdin
            .take()
            .expect("a pipe")
            .write_all(b"\n")
            .expect("write");
        job.wait().expect("it ends");
        assert_eq!(
            UnlinkedFiles::of_agent(Some(job.id()), vec![]).measure(device),
            (0, 0)
        );
    }
}
