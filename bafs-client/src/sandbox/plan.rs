//! What a caller asks for: volumes at paths, a command, its environment. Runs nothing.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use bafs_proto::path::{KERNEL_DIRECTORY_OBJECTION, ROOT_PATH, is_in_kernel_directory};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::limits::VOLUMES_MAX;
use super::temporary_directories::TemporaryDirectories;

/// What the job may do to a volume through its mount path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// The mount passes writes on; the volume itself may still refuse them.
    ReadWrite,
    /// The kernel answers every write with `EROFS`.
    ReadOnly,
}

/// One volume of the job: a directory or file that exists now, and where the job sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct VolumeBind {
    /// The volume's name; it becomes part of an environment variable.
    pub name: String,
    /// The directory on this host, with its file system already mounted.
    #[serde(with = "exact_path")]
    pub source: PathBuf,
    /// The absolute path in the job's name space; it need not exist on this host.
    #[serde(with = "exact_path")]
    pub path: PathBuf,
    /// What the job may do there.
    pub access: Access,
}

/// Whose rights the job has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobUser {
    /// The user who started the agent.
    SameUser,
    /// Another user; only an agent that runs as root can become one.
    OtherUser {
        /// The user id the job shows and is checked against.
        uid: u32,
        /// The primary group id.
        gid: u32,
        /// The supplementary group ids.
        groups: Vec<u32>,
    },
}

/// Whether the job shares the agent's terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobSession {
    /// A session of its own: signals of the agent's terminal do not reach the job.
    NewSession,
    /// The agent's session and process group: Ctrl-C and Ctrl-Z reach the job directly.
    SharedTerminal,
}

/// A whole job: its name space and its command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobPlan {
    /// The job's name, for process listings; the environment variable comes from
    /// [`job_environment`].
    pub job: String,
    /// The volumes, at most [`VOLUMES_MAX`].
    pub volumes: Vec<VolumeBind>,
    /// The program: a path in the job's name space, or a name looked up in the job's `PATH`.
    pub program: OsString,
    /// The arguments after the program's name.
    pub arguments: Vec<OsString>,
    /// The complete environment.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory in the job's name space.
    #[serde(with = "exact_path")]
    pub working_directory: PathBuf,
    /// Whose rights the job has.
    pub user: JobUser,
    /// Whether the job shares the agent's terminal.
    pub session: JobSession,
    /// The job's own directories for temporary files; without them it sees the host's.
    pub temporary: Option<TemporaryDirectories>,
}

/// Where the job's standard input comes from.
#[derive(Debug)]
pub enum InputSource {
    /// An empty file.
    Null,
    /// The agent's own standard input.
    Inherit,
    /// A descriptor that the caller opened.
    Descriptor(OwnedFd),
    /// A file of the job's name space, opened with the job's rights.
    Path(PathBuf),
}

/// Where one of the job's output streams goes.
#[derive(Debug)]
pub enum OutputTarget {
    /// Nowhere.
    Null,
    /// The same stream of the agent.
    Inherit,
    /// A descriptor that the caller opened.
    Descriptor(OwnedFd),
    /// A file of the job's name space, created or truncated with the job's rights. Both
    /// streams may name the same file.
    Path(PathBuf),
}

/// The job's three standard streams.
#[derive(Debug)]
pub struct JobStreams {
    /// Standard input.
    pub stdin: InputSource,
    /// Standard output.
    pub stdout: OutputTarget,
    /// Standard error.
    pub stderr: OutputTarget,
}

impl JobStreams {
    /// Batch style: empty input, outputs shared with the agent.
    pub fn batch() -> Self {
        Self {
            stdin: InputSource::Null,
            stdout: OutputTarget::Inherit,
            stderr: OutputTarget::Inherit,
        }
    }

    /// Interactive style: all three streams shared with the agent.
    pub fn interactive() -> Self {
        Self {
            stdin: InputSource::Inherit,
            stdout: OutputTarget::Inherit,
            stderr: OutputTarget::Inherit,
        }
    }
}

/// Why a plan can never run, on any machine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// The path is relative, or has `.` or `..` in it.
    #[error(
        "mount path {} of volume {volume} is invalid; give an absolute path below /, without . or \
         ..",
        path.display()
    )]
    BadPath {
        /// The volume's name.
        volume: String,
        /// The path as given.
        path: PathBuf,
    },
    /// The kernel fills the directory; a volume there would hide it from the job.
    #[error(
        "the mount path '{}' {KERNEL_DIRECTORY_OBJECTION}; give volume {volume} another path, such \
         as /data",
        path.display()
    )]
    KernelPath {
        /// The volume's name.
        volume: String,
        /// The path as given.
        path: PathBuf,
    },
    /// Two volumes as the root directory.
    #[error("volumes {one} and {other} are both the root of the job; mount one below it")]
    TwoRoots {
        /// A volume's name.
        one: String,
        /// Another volume's name.
        other: String,
    },
    /// Two volumes at one path, or one inside the other.
    #[error(
        "mount path {} of volume {inner} lies in {}, where volume {outer} is mounted",
        inner_path.display(), outer_path.display()
    )]
    Overlap {
        /// The volume with the shorter path.
        outer: String,
        /// Its path.
        outer_path: PathBuf,
        /// The volume with the equal or longer path.
        inner: String,
        /// Its path.
        inner_path: PathBuf,
    },
    /// The command is empty or contains a NUL byte.
    #[error("the command is empty or contains a NUL byte")]
    BadCommand,
    /// A variable has an empty name, or `=` or NUL where it cannot be.
    #[error("environment variable {name:?} cannot be passed to a program")]
    BadVariable {
        /// The variable's name.
        name: OsString,
    },
    /// More volumes than a job may have.
    #[error("{count} volumes: a job may have at most {VOLUMES_MAX}")]
    TooManyVolumes {
        /// How many the plan has.
        count: usize,
    },
}

impl VolumeBind {
    /// Whether it is the whole root directory of the job.
    pub(super) fn is_root(&self) -> bool {
        self.path == Path::new(ROOT_PATH)
    }
}

impl JobPlan {
    /// The volume that is the whole root directory of the job, if it has one.
    pub(super) fn root(&self) -> Option<&VolumeBind> {
        self.volumes.iter().find(|volume| volume.is_root())
    }

    /// Checks what can be checked without looking at this host.
    pub fn check(&self) -> Result<(), PlanError> {
        if self.volumes.len() > VOLUMES_MAX {
            return Err(PlanError::TooManyVolumes {
                count: self.volumes.len(),
            });
        }
        let is_below = |volume: &&VolumeBind| !volume.is_root();
        for volume in self.volumes.iter().filter(is_below) {
            check_path(volume)?;
        }
        let mut roots = self.volumes.iter().filter(|volume| volume.is_root());
        if let (Some(one), Some(other)) = (roots.next(), roots.next()) {
            return Err(PlanError::TwoRoots {
                one: one.name.clone(),
                other: other.name.clone(),
            });
        }
        check_overlaps(
            self.volumes
                .iter()
                .filter(is_below)
                .map(|v| (v.name.as_str(), v.path.as_path())),
        )?;
        let nul = |text: &OsString| text.as_encoded_bytes().contains(&0);
        if self.program.is_empty() || nul(&self.program) || self.arguments.iter().any(nul) {
            return Err(PlanError::BadCommand);
        }
        for (name, value) in &self.environment {
            let bad = name.is_empty() || name.as_encoded_bytes().contains(&b'=');
            if bad || nul(name) || nul(value) {
                return Err(PlanError::BadVariable { name: name.clone() });
            }
        }
        Ok(())
    }
}

fn check_path(volume: &VolumeBind) -> Result<(), PlanError> {
    let path = volume.path.clone();
    let text = path.as_os_str().as_encoded_bytes();
    // `components()` silently drops inner `.`, so the text is looked at as well.
    let dots = text
        .split(|&byte| byte == b'/')
        .any(|part| part == b"." || part == b"..");
    let names = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_)))
        .count();
    if !path.is_absolute() || names == 0 || dots || text.contains(&0) {
        return Err(PlanError::BadPath {
            volume: volume.name.clone(),
            path,
        });
    }
    if is_in_kernel_directory(&path) {
        return Err(PlanError::KernelPath {
            volume: volume.name.clone(),
            path,
        });
    }
    Ok(())
}

/// Refuses equal and nested paths; the order of the volumes does not matter.
pub(super) fn check_overlaps<'a>(
    places: impl Iterator<Item = (&'a str, &'a Path)>,
) -> Result<(), PlanError> {
    let mut sorted: Vec<_> = places.collect();
    // Component order puts a directory right before everything below it.
    sorted.sort_by(|one, two| one.1.cmp(two.1));
    for pair in sorted.windows(2) {
        let [(outer, outer_path), (inner, inner_path)] = [pair[0], pair[1]];
        if inner_path.starts_with(outer_path) {
            return Err(PlanError::Overlap {
                outer: outer.to_owned(),
                outer_path: outer_path.to_owned(),
                inner: inner.to_owned(),
                inner_path: inner_path.to_owned(),
            });
        }
    }
    Ok(())
}

/// The environment of a job: everything inherited except `BAFS_*`, then `BAFS_JOB` and one
/// `BAFS_<VOLUME>` with the mount path for each volume.
///
/// All inherited `BAFS_*` variables go, as they may carry tokens and addresses meant for the
/// agent alone. `BAFS_JOB` wins over a volume that is called `job`.
pub fn job_environment(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
    job: &str,
    volumes: &[VolumeBind],
) -> Vec<(OsString, OsString)> {
    let ours = |name: &OsStr| name.as_encoded_bytes().starts_with(b"BAFS_");
    let mut environment: Vec<_> = inherited
        .into_iter()
        .filter(|(name, _)| !ours(name))
        .collect();
    for volume in volumes {
        let name = variable_name(&volume.name);
        if name != "BAFS_JOB" {
            environment.push((name.into(), volume.path.clone().into_os_string()));
        }
    }
    environment.push(("BAFS_JOB".into(), job.into()));
    environment
}

/// `my-data.1` becomes `BAFS_MY_DATA_1`.
fn variable_name(volume: &str) -> String {
    let tail = volume
        .chars()
        .map(|letter| match letter.to_ascii_uppercase() {
            upper if upper.is_ascii_alphanumeric() => upper,
            _ => '_',
        });
    "BAFS_".chars().chain(tail).collect()
}

/// Paths travel byte for byte: a file name need not be UTF-8.
pub(super) mod exact_path {
    use std::ffi::OsString;
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        OsString::deserialize(from).map(PathBuf::from)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn plan(paths: &[&str]) -> JobPlan {
        let volumes = paths.iter().map(|path| VolumeBind {
            name: format!("v{}", path.len()),
            source: "/".into(),
            path: path.into(),
            access: Access::ReadWrite,
        });
        JobPlan {
            job: "j".into(),
            volumes: volumes.collect(),
            program: "true".into(),
            arguments: vec![],
            environment: vec![],
            working_directory: "/".into(),
            user: JobUser::SameUser,
            session: JobSession::NewSession,
            temporary: None,
        }
    }

    #[test]
    fn valid_paths_are_accepted() {
        for paths in [
            &["/mydata"][..],
            &["/tmp"],
            &["/data/in", "/data/out"],
            &["/a", "/ab"],
            &["/", "/a"],
        ] {
            assert_eq!(plan(paths).check(), Ok(()), "{paths:?}");
        }
    }

    #[test]
    fn invalid_paths_are_refused() {
        for path in [
            "",
            "data",
            "//data/..",
            "/a/../b",
            "/a/./b",
            "/a/..",
            "/a\0b",
        ] {
            let answer = plan(&[path]).check();
            assert!(
                matches!(answer, Err(PlanError::BadPath { .. })),
                "{path:?}: {answer:?}"
            );
        }
        assert_eq!(plan(&["/device"]).check(), Ok(()));
        for path in ["/proc", "/proc/x", "/sys/x", "/dev", "/dev//shm/z"] {
            let refused = plan(&[path]).check().unwrap_err();
            assert!(matches!(refused, PlanError::KernelPath { .. }), "{refused}");
            let words = format!("the mount path '{path}' lies under /proc, /sys or /dev;");
            assert!(refused.to_string().starts_with(&words), "{refused}");
        }
    }

    #[test]
    fn overlapping_paths_are_refused_in_any_order() {
        for paths in [
            ["/a", "/a"],
            ["/a", "/a/b/c"],
            ["/a/b", "/a/"],
            ["/a/b", "/a//b/c"],
        ] {
            let answer = plan(&paths).check();
            assert!(
                matches!(answer, Err(PlanError::Overlap { .. })),
                "{paths:?}: {answer:?}"
            );
        }
        let roots = plan(&["/", "/"]).check();
        assert!(
            matches!(roots, Err(PlanError::TwoRoots { .. })),
            "{roots:?}"
        );
        // `/a-b` sorts between `/a` and `/a/b` as text, not as a path.
        assert!(plan(&["/a", "/a-b", "/a/b"]).check().is_err());
    }

    #[test]
    fn environment_loses_secrets_and_gains_mount_paths() {
        let inherited = [
            ("PATH", "/bin"),
            ("BAFS_TOKEN", "s3cret"),
            ("BAFS_JOB", "outer"),
        ]
        .map(|(n, v)| (OsString::from(n), OsString::from(v)));
        let mut plan = plan(&["/in"]);
        plan.volumes[0].name = "my-data.1".into();
        let made = job_environment(inherited, "inner", &plan.volumes);
        let expected = [
            ("PATH", "/bin"),
            ("BAFS_MY_DATA_1", "/in"),
            ("BAFS_JOB", "inner"),
        ]
        .map(|(n, v)| (OsString::from(n), OsString::from(v)));
        assert_eq!(made, expected);
    }

    #[test]
    fn non_utf8_names_survive_serialisation() {
        let mut plan = plan(&["/x"]);
        plan.volumes[0].source = OsString::from_vec(b"/tmp/\xff\xfe".to_vec()).into();
        let text = serde_json::to_string(&plan).unwrap();
        let back: JobPlan = serde_json::from_str(&text).unwrap();
        assert_eq!(back.volumes[0].source, plan.volumes[0].source);
    }
}
