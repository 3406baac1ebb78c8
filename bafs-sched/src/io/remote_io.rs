//! What a run without caches keeps at home: the directories that stand for scratch volumes, their
//! files' way to where they are wanted, and their removal. Moves no data.

use bafs_proto::file_op::{Caller, FileOp, FileReply, S_IFDIR, S_IFMT};
use bafs_proto::ids::{AgentId, Epoch, ExtractionId, InodeNo, RunId};
use bafs_proto::message::{CloseTree, OpenTree, RunFileOps, SourceKind, StatSource, TreeRef};
use bafs_proto::path::is_program_place;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{Mount, Scheme, Url, VolumeKind, Workflow};

use super::homes::HomePath;
use super::servers::Servers;
use crate::Settings;

const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const DIRECTORY_MODE: u32 = 0o755;
const CALL_TIMEOUT_MS: u64 = 20_000;
const PAGE_BYTES: u32 = 64 << 10;

/// The directory at home that holds what stands for the scratch volumes of a run.
pub(crate) fn run_directory(run: RunId) -> String {
    format!(".bafs-remote/{run}")
}

/// The home that holds the scratch volumes: the one that the results go to.
pub(crate) fn find_results_home(workflow: &Workflow) -> Option<&Url> {
    let targets = workflow.extracts.iter().map(|extract| &extract.target);
    let sources = workflow
        .volumes
        .iter()
        .filter_map(|volume| match &volume.kind {
            VolumeKind::Cache { source, .. } => Some(source),
            VolumeKind::Scratch { fill } => fill.as_ref(),
        });
    let is_ours = |url: &&Url| matches!(url.scheme, Scheme::Bafs | Scheme::File);
    targets.chain(sources).find(is_ours)
}

/// Why a workflow cannot run without volumes, if so: one that is filled and written would need a
/// copy at home, and no job has a directory at home for its root or its programs.
pub(crate) fn why_unsupported(workflow: &Workflow, settings: &Settings) -> Option<String> {
    let has_caches = !settings.caches_nothing();
    let is_filled = |volume: usize| {
        matches!(
            workflow.volumes[volume].kind,
            VolumeKind::Scratch { fill: Some(_) }
        )
    };
    if let Some(set) = workflow.extracts.iter().find(|extract| extract.is_set()) {
        return Some(format!(
            "files '{}' go to {}/ as a set: remote I/O extracts single files only; name each file, \
             or run without --remote-io",
            set.path, set.target
        ));
    }
    let mounts = || {
        let jobs = workflow.jobs.iter();
        jobs.flat_map(|job| job.mounts.iter().map(move |mount| (job, mount)))
    };
    let is_at_home = |mount: &Mount| {
        let kind = &workflow.volume(mount.volume).kind;
        !has_caches || matches!(kind, VolumeKind::Scratch { .. })
    };
    let needs_volume = |mount: &Mount| mount.is_root() || is_program_place(&mount.path);
    let mut unshown = mounts().filter(|(_, it)| needs_volume(it) && is_at_home(it));
    if let Some((job, mount)) = unshown.next() {
        let what = match mount.is_root() {
            true => format!("has the root '{}'", workflow.volume(mount.volume).name),
            false => format!("runs '{}', which the workflow brings", mount.path),
        };
        return Some(format!(
            "job '{}' {what}: with remote I/O no job has roots or programs of the workflow; \
             install them on the nodes, or run without --remote-io",
            job.name
        ));
    }
    let mut written =
        mounts().filter(|(_, mount)| mount.writable && is_filled(mount.volume.as_usize()));
    let (job, mount) = written.next()?;
    let volume = &workflow.volume(mount.volume).name;
    Some(format!(
        "job '{}' writes volume '{volume}', which is filled from home: remote I/O would overwrite \
         the source; mount the volume read-only, or run without --remote-io",
        job.name
    ))
}

/// Links the file `source` of a home to `target`, in place of what is there; answers its size.
/// Costs no transfer, and those who still read the source are not disturbed.
pub(crate) async fn link_file(
    servers: &Servers,
    home: &str,
    source: &str,
    target: &str,
    extract: ExtractionId,
) -> Result<u64> {
    let mut session = HomeSession::open(servers, home).await?;
    let linked = session.link(source, target, extract).await;
    session.close().await;
    linked
}

/// The directory that stands for a volume that shows `source`: the source itself if it is a
/// directory, else a directory of this run with a link to the file.
pub(crate) async fn prepare_source_directory(
    servers: &Servers,
    source: HomePath,
    extract: ExtractionId,
) -> Result<HomePath> {
    let call = StatSource {
        path: source.path.clone(),
    };
    let entry = servers
        .call_until(&source.address, call, CALL_TIMEOUT_MS)
        .await?;
    if entry.kind != SourceKind::File {
        return Ok(source);
    }
    let path = format!("{}/{extract}", run_directory(servers.run));
    let name = source.path.rsplit('/').next().unwrap_or_default();
    link_file(
        servers,
        &source.address,
        &source.path,
        &format!("{path}/{name}"),
        extract,
    )
    .await?;
    Ok(HomePath { path, ..source })
}

/// Removes what a run left at its home; nothing there is fine.
pub(crate) async fn remove_run_directory(servers: &Servers, workflow: &Workflow) -> Result<()> {
    let Some(url) = find_results_home(workflow) else {
        return Ok(());
    };
    let home = servers.resolve_url(url).await?.address;
    let mut session = HomeSession::open(servers, &home).await?;
    let removed = session.remove_tree(&run_directory(servers.run)).await;
    session.close().await;
    removed
}

/// A session with the whole tree of a home.
struct HomeSession<'a> {
    servers: &'a Servers,
    home: &'a str,
    epoch: Epoch,
    sequence: u64,
}

impl<'a> HomeSession<'a> {
    async fn open(servers: &'a Servers, home: &'a str) -> Result<Self> {
        let call = OpenTree {
            tree: home_tree(),
            agent: AgentId::random(),
            writable: true,
            yields: false,
            resumed_incarnation: None,
        };
        let session = servers.call_until(home, call, CALL_TIMEOUT_MS).await?;
        Ok(Self {
            servers,
            home,
            epoch: session.epoch,
            sequence: 0,
        })
    }

    async fn close(self) {
        let call = CloseTree {
            tree: home_tree(),
            epoch: self.epoch,
            lifetime_ms_min: 0,
        };
        if let Err(error) = self
            .servers
            .call_until(self.home, call, CALL_TIMEOUT_MS)
            .await
        {
            tracing::debug!(home = self.home, %error, "session ends by its lease");
        }
    }

    async fn link(&mut self, source: &str, target: &str, extract: ExtractionId) -> Result<u64> {
        let missing = || Error::new(ErrorCode::NotFound, format!("'{source}' was not written"));
        let (ino, size, _) = self.find_entry(source).await?.ok_or_else(missing)?;
        let (directory, name) = target.rsplit_once('/').unwrap_or(("", target));
        let parent = self.make_directories(directory).await?;
        let draft = format!(".bafs-{extract}").into_bytes();
        let made = self
            .run_operation(FileOp::MakeLink {
                ino,
                parent,
                name: draft.clone(),
            })
            .await?;
        if made.as_ref().err().is_some_and(|errno| *errno != EEXIST) {
            return Err(operation_error(
                "link",
                target,
                made.err().unwrap_or_default(),
            ));
        }
        let new_name = name.as_bytes().to_vec();
        let rename = FileOp::Rename {
            parent,
            name: draft.clone(),
            new_parent: parent,
            new_name,
            flags: 0,
        };
        self.run_operation(rename)
            .await?
            .map_err(|errno| operation_error("rename", target, errno))?;
        // Renaming one link of a file over another of the same file leaves both.
        let _ = self
            .run_operation(FileOp::Unlink {
                parent,
                name: draft,
            })
            .await?;
        Ok(size)
    }

    /// File number, size and mode of what is at a path.
    async fn find_entry(&mut self, path: &str) -> Result<Option<(InodeNo, u64, u32)>> {
        let mut at = (InodeNo::ROOT, 0, S_IFDIR);
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let name = name.as_bytes().to_vec();
            match self
                .run_operation(FileOp::Lookup { parent: at.0, name })
                .await?
            {
                Ok(FileReply::Attr(attr)) => at = (attr.ino, attr.size, attr.mode),
                Err(ENOENT) => return Ok(None),
                Err(errno) => return Err(operation_error("look up", path, errno)),
                Ok(other) => return Err(unexpected_reply(&other)),
            }
        }
        Ok(Some(at))
    }

    async fn make_directories(&mut self, path: &str) -> Result<InodeNo> {
        let mut parent = InodeNo::ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let name = name.as_bytes().to_vec();
            let make = FileOp::MakeDirectory {
                parent,
                name: name.clone(),
                mode: DIRECTORY_MODE,
            };
            if let Err(errno) = self.run_operation(make).await?
                && errno != EEXIST
            {
                return Err(operation_error("make directory", path, errno));
            }
            parent = match self.run_operation(FileOp::Lookup { parent, name }).await? {
                Ok(FileReply::Attr(attr)) => attr.ino,
                Ok(other) => return Err(unexpected_reply(&other)),
                Err(errno) => return Err(operation_error("look up", path, errno)),
            };
        }
        Ok(parent)
    }

    async fn remove_tree(&mut self, path: &str) -> Result<()> {
        let Some((top, ..)) = self.find_entry(path).await? else {
            return Ok(());
        };
        let mut directories = vec![(InodeNo::ROOT, Vec::new(), top)];
        let mut next = 0;
        while next < directories.len() {
            let ino = directories[next].2;
            for (name, child, mode) in self.list_directory(ino).await? {
                if mode & S_IFMT == S_IFDIR {
                    directories.push((ino, name, child));
                } else {
                    let _ = self
                        .run_operation(FileOp::Unlink { parent: ino, name })
                        .await?;
                }
            }
            next += 1;
        }
        for (parent, name, _) in directories.into_iter().skip(1).rev() {
            let _ = self
                .run_operation(FileOp::RemoveDirectory { parent, name })
                .await?;
        }
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        if let Some((above, ..)) = self.find_entry(parent).await? {
            let name = name.as_bytes().to_vec();
            let removed = self
                .run_operation(FileOp::RemoveDirectory {
                    parent: above,
                    name,
                })
                .await?;
            removed.map_err(|errno| operation_error("remove", path, errno))?;
        }
        // Other runs may still have something there; then it stays.
        let name = parent.as_bytes().to_vec();
        let _ = self
            .run_operation(FileOp::RemoveDirectory {
                parent: InodeNo::ROOT,
                name,
            })
            .await?;
        Ok(())
    }

    async fn list_directory(&mut self, ino: InodeNo) -> Result<Vec<(Vec<u8>, InodeNo, u32)>> {
        let handle = match self.run_operation(FileOp::OpenDirectory { ino }).await? {
            Ok(FileReply::Opened { handle, .. }) => handle,
            Ok(other) => return Err(unexpected_reply(&other)),
            Err(errno) => return Err(operation_error("list", "a directory", errno)),
        };
        let (mut all, mut cookie) = (Vec::new(), 0);
        loop {
            let read = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: PAGE_BYTES,
                plus: true,
            };
            let entries = match self.run_operation(read).await? {
                Ok(FileReply::Entries(entries)) => entries,
                Ok(other) => return Err(unexpected_reply(&other)),
                Err(errno) => return Err(operation_error("list", "a directory", errno)),
            };
            let Some(last) = entries.last() else { break };
            cookie = last.cookie;
            let real = entries
                .into_iter()
                .filter(|e| e.name != b"." && e.name != b"..");
            all.extend(real.map(|entry| {
                let ino = entry.attr.map_or(entry.ino, |attr| attr.ino);
                (entry.name, ino, entry.mode)
            }));
        }
        let _ = self
            .run_operation(FileOp::ReleaseDirectory { handle })
            .await?;
        Ok(all)
    }

    async fn run_operation(&mut self, op: FileOp) -> Result<Result<FileReply, i32>> {
        self.sequence += 1;
        let call = RunFileOps {
            tree: home_tree(),
            epoch: self.epoch,
            sequence: self.sequence,
            after_sequence: None,
            caller: Caller::default(),
            ops: vec![op],
            assigned_numbers: Vec::new(),
        };
        let mut answer = self
            .servers
            .call_until(self.home, call, CALL_TIMEOUT_MS)
            .await?;
        let first = answer.results.pop().ok_or_else(|| {
            Error::new(ErrorCode::Malformed, "home sent no result for an operation")
        })?;
        Ok(first.map_err(|errno| errno.0))
    }
}

fn home_tree() -> TreeRef {
    TreeRef::Home(String::new())
}

fn operation_error(doing: &str, path: &str, errno: i32) -> Error {
    let why = std::io::Error::from_raw_os_error(errno);
    Error::new(
        ErrorCode::ServerFault,
        format!("cannot {doing} '{path}' at home: {why}"),
    )
}

fn unexpected_reply(reply: &FileReply) -> Error {
    let text = format!("home sent a wrong reply to an operation: {reply:?}");
    Error::new(ErrorCode::Malformed, text)
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::IoMode;

    #[test]
    fn roots_and_programs_need_volumes() {
        let why = |statement: &str, has_caches| {
            let text = format!(
                "volume c cache bafs://home/c 1 MB\nvolume s scratch 1 MB\n\
                 job w {{\nexecutable = w\n}}\nmount s w /s\n\
                 job a {{\nexecutable = tool\n}}\nparent w child a\n{statement}\n"
            );
            let none = |path: &str| Err(path.to_owned());
            let parsed = parse_workflow("w.bafs", &text, &none).expect("it is right");
            let io = match has_caches {
                true => IoMode::CachesOnly,
                false => IoMode::Remote,
            };
            let settings = Settings {
                io,
                ..Settings::default()
            };
            why_unsupported(&parsed.workflow, &settings)
        };
        let program = "program tool from bafs://home/bin/tool";
        let told = why(program, false).expect("it cannot");
        let begins = "job 'a' runs '/bafs/bin/tool', which the workflow brings: ";
        assert!(told.starts_with(begins), "{told}");
        let told = why("root c a", false).expect("it cannot");
        assert!(told.starts_with("job 'a' has the root 'c': "), "{told}");
        assert_eq!(why(program, true), None);
        assert_eq!(why("root c a", true), None, "the cache is a volume");
        assert!(why("root s a", true).is_some());
        assert_eq!(why("mount c a /c", false), None);
    }
}
