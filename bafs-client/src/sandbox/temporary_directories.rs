//! A job's own directories for temporary files: which host directories are replaced, and which of
//! their entries a job sees all the same. Mounts nothing.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::mount_layout::{HostTree, MountObstacle, PathKind};
use super::plan::exact_path;

/// Directories on disk that are a job's own, and what each is called among the job's own.
const ON_DISK: [(&str, &str); 2] = [("/tmp", "tmp"), ("/var/tmp", "var-tmp")];

/// Where memory is shared by name.
pub(super) const SHARED_MEMORY: &str = "/dev/shm";

/// Variables that name a directory for temporary files.
pub const TEMPORARY_VARIABLES: [&str; 4] = ["TMPDIR", "TMP", "TEMP", "TEMPDIR"];

/// What the job's own home is called among its directories, and who may use it: anybody who the job
/// runs as, as none but the job sees it.
const HOME: &str = "home";
const HOME_MODE: u32 = 0o777;

/// Anybody may make files there, and remove only what is their own.
const DIRECTORY_MODE: u32 = 0o1777;

/// Where a job's temporary files go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemporaryDirectories {
    /// A directory of this host for this job alone.
    #[serde(with = "exact_path")]
    pub directory: PathBuf,
    /// The most bytes of shared memory.
    pub memory_bytes: u64,
    /// Which of the directories are the host's.
    pub shared_directories: BTreeSet<String>,
    /// Paths of the host that the job's own description names.
    pub named_paths: Vec<OsString>,
}

/// A directory of the host that the job does not see, and what it sees instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PrivateDirectory {
    /// The directory, free of symbolic links.
    pub(super) target: PathBuf,
    /// The job's own.
    pub(super) source: PathBuf,
    /// Entries of the host's that the job sees all the same.
    pub(super) entries: BTreeSet<OsString>,
}

impl TemporaryDirectories {
    /// Makes the directories. They go with `directory`, which its owner removes.
    pub(super) fn create_directories(&self) -> io::Result<()> {
        for (_, name) in ON_DISK {
            let path = self.directory.join(name);
            fs::create_dir_all(&path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(DIRECTORY_MODE))?;
        }
        Ok(())
    }

    /// The job's own directories on disk, and what each takes the place of.
    pub(super) fn own_directories(&self) -> io::Result<Vec<(PathBuf, PathBuf)>> {
        let own = ON_DISK.into_iter().map(|(path, name)| {
            let source = match self.shared_directories.contains(path) {
                true => fs::canonicalize(path)?,
                false => fs::canonicalize(self.directory.join(name))?,
            };
            Ok((PathBuf::from(path), source))
        });
        own.collect()
    }

    /// Makes a directory that is the job's home where it has none of the host's.
    pub(super) fn create_home(&self) -> io::Result<PathBuf> {
        let path = self.directory.join(HOME);
        fs::create_dir_all(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(HOME_MODE))?;
        fs::canonicalize(path)
    }

    pub(super) fn has_private_memory(&self) -> bool {
        !self.shared_directories.contains(SHARED_MEMORY)
    }

    /// The directories on disk that the job has for itself.
    pub(super) fn private_directories(
        &self,
        host: &impl HostTree,
    ) -> io::Result<Vec<PrivateDirectory>> {
        let mut privates: Vec<PrivateDirectory> = Vec::new();
        for (path, name) in ON_DISK {
            let Some((target, PathKind::Directory)) = host.resolve(Path::new(path)) else {
                continue;
            };
            let is_known = |known: &PrivateDirectory| known.target == target;
            if self.shared_directories.contains(path) || privates.iter().any(is_known) {
                continue;
            }
            let entries = self.visible_entries(host, Path::new(path), &target);
            let source = fs::canonicalize(self.directory.join(name))?;
            privates.push(PrivateDirectory {
                target,
                source,
                entries,
            });
        }
        Ok(privates)
    }

    /// Entries of a directory on the way to what is named, also by links.
    fn visible_entries(
        &self,
        host: &impl HostTree,
        path: &Path,
        target: &Path,
    ) -> BTreeSet<OsString> {
        let mut entries = BTreeSet::new();
        for named in self.named_paths.iter().map(Path::new) {
            let Some((real, _)) = host.resolve(named) else {
                continue;
            };
            let literal = named.strip_prefix(path).ok();
            for below in [literal, real.strip_prefix(target).ok()]
                .into_iter()
                .flatten()
            {
                if let Some(Component::Normal(first)) = below.components().next() {
                    entries.insert(first.to_owned());
                }
            }
        }
        entries
    }
}

/// The host without what private directories take the place of.
pub(super) struct MaskedHostTree<'a, H>(pub(super) &'a H, pub(super) &'a [PrivateDirectory]);

impl<H: HostTree> HostTree for MaskedHostTree<'_, H> {
    fn resolve(&self, path: &Path) -> Option<(PathBuf, PathKind)> {
        let (real, kind) = self.0.resolve(path)?;
        self.is_shown(&real).then_some((real, kind))
    }

    fn obstacle_at(&self, path: &Path) -> Option<MountObstacle> {
        self.is_shown(path).then(|| self.0.obstacle_at(path))?
    }
}

impl<H> MaskedHostTree<'_, H> {
    /// Whether the job sees what is at a path without symbolic links.
    fn is_shown(&self, real: &Path) -> bool {
        let is_shown = |private: &PrivateDirectory| match real.strip_prefix(&private.target) {
            Ok(below) => match below.components().next() {
                Some(Component::Normal(first)) => private.entries.contains(first),
                _ => true,
            },
            Err(_) => true,
        };
        self.1.iter().all(is_shown)
    }
}

/// What of a job's words may be a path below a directory for temporary files: a whole word, what
/// follows its first `=`, the parts of a list with `:`, and inside a longer word the entry on the
/// way to a path, if that is a directory. A file that a script may be about to make is none.
pub fn find_named_paths<'a>(
    words: impl IntoIterator<Item = &'a OsStr>,
    is_directory: impl Fn(&Path) -> bool,
) -> Vec<OsString> {
    let mut named = BTreeSet::new();
    for word in words {
        let bytes = word.as_bytes();
        let value = bytes.splitn(2, |&byte| byte == b'=').last();
        let parts = bytes.split(|&byte| byte == b':');
        let wholes = [bytes].into_iter().chain(value).chain(parts);
        named.extend(
            wholes
                .filter(|whole| is_below_temporary(whole))
                .map(OsStr::from_bytes),
        );
        for (path, _) in ON_DISK {
            let prefix = [path.as_bytes(), b"/"].concat();
            let starts = bytes.windows(prefix.len()).enumerate();
            for (start, _) in starts.filter(|(_, window)| *window == prefix) {
                if is_inside_path(&bytes[..start]) {
                    continue;
                }
                let rest = &bytes[start + prefix.len()..];
                let length = rest.iter().position(|byte| is_name_end(*byte));
                let end = start + prefix.len() + length.unwrap_or(rest.len());
                let entry = OsStr::from_bytes(&bytes[start..end]);
                if end > start + prefix.len() && is_directory(Path::new(entry)) {
                    named.insert(entry);
                }
            }
        }
    }
    named.into_iter().map(OsStr::to_owned).collect()
}

fn is_below_temporary(word: &[u8]) -> bool {
    let path = Path::new(OsStr::from_bytes(word));
    ON_DISK
        .iter()
        .any(|(known, _)| path.starts_with(known) && path != Path::new(known))
}

/// Whether what comes next belongs to a path that began earlier, as the `/tmp` of `/var/tmp` does
/// and that of `-I/tmp` does not.
fn is_inside_path(before: &[u8]) -> bool {
    let mut word = before.rsplit(|&byte| byte != b'/' && is_name_end(byte));
    word.next().is_some_and(|word| word.contains(&b'/'))
}

/// Whether a shell, or a list, ends a name with this character.
fn is_name_end(byte: u8) -> bool {
    byte.is_ascii_whitespace() || b"/'\"`;:,&|<>(){}$*?[]\\=#!".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(word: &str) -> Vec<String> {
        let is_directory = |path: &Path| path.to_string_lossy().ends_with(".d");
        let found = find_named_paths([OsStr::new(word)], is_directory);
        found
            .into_iter()
            .map(|path| path.into_string().unwrap())
            .collect()
    }

    #[test]
    fn arguments_name_paths_below_tmp() {
        assert_eq!(named("/tmp/a/tool.sh"), ["/tmp/a/tool.sh"]);
        assert_eq!(named("--in=/tmp/a.fa"), ["/tmp/a.fa"]);
        assert_eq!(named("/bin:/tmp/venv/bin"), ["/tmp/venv/bin"]);
        assert_eq!(named("/var/tmp/x"), ["/var/tmp/x"]);
        for none in ["/tmp", "/tmp/", "tmp/a", "/home/tmp/a", ""] {
            assert!(named(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn scripts_name_directories_only() {
        assert_eq!(named("cd /tmp/x.d && ./a"), ["/tmp/x.d"]);
        assert_eq!(named("'/tmp/x.d/tool' 1 >/tmp/out"), ["/tmp/x.d"]);
        assert_eq!(named("cat </var/tmp/y.d/in;"), ["/var/tmp/y.d"]);
        assert_eq!(named("-I/tmp/x.d"), ["/tmp/x.d"]);
        assert!(named("ls /home/tmp/x.d").is_empty());
        assert!(named("echo > /tmp/out").is_empty());
        assert!(named("cat /tmp/$X.d /tmp/ /tmp/*.d").is_empty());
    }
}
