//! What can be known of a workflow's files before anything runs: sources and programs that are not
//! at home, results that have no place there. It reads, and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bafs_proto::path::PROGRAM_DIRECTORY;
use bafs_workflow::{Job, Mount, Url, Volume, VolumeKind, Workflow};
use serde::Serialize;

use crate::home_view::{FoundPath, HomeView, LookupError, NodesWithout};
use crate::units::format_bytes;

/// Places of one kind of finding that a person is shown.
const PLACES_SHOWN_MAX: usize = 5;

/// Places that are looked at: a call for each takes a millisecond, and nobody waits minutes.
const LOOKUPS_MAX: usize = 20_000;

/// Bytes of a script that are read for its `#!` line: what the kernel reads.
const SHEBANG_BYTES: usize = 256;

/// What a conda environment has at its top, and no system has.
const ENVIRONMENT_MARK: &str = "conda-meta";

/// What an environment lacks that programs need: where the loader is, and the rest of a system.
const SYSTEM_DIRECTORIES: [&str; 2] = ["usr", "lib64"];

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FindingKind {
    SourceMissing,
    SourceUnreadable,
    ProgramMissing,
    ProgramIsDirectory,
    ProgramNotExecutable,
    InterpreterMissing,
    RequiredFileMissing,
    ArgumentMissing,
    TargetIsDirectory,
    TargetIsFile,
    TargetBelowFile,
    TooMuchMemory,
    TooMuchDisk,
    RootIsFile,
    RootIsEnvironment,
    ProgramOnNoNode,
    ProgramOnSomeNodes,
    NotLookedAt,
}

/// All faults of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) kind: FindingKind,
    /// Whether jobs will fail of it.
    pub(crate) is_error: bool,
    /// What is wrong with each of the places.
    pub(crate) message: &'static str,
    /// Each with what names it.
    pub(crate) places: Vec<String>,
    /// What to do about it.
    pub(crate) remedy: &'static str,
}

impl FindingKind {
    fn message(self) -> &'static str {
        match self {
            Self::SourceMissing => "sources of volumes are not at their home",
            Self::SourceUnreadable => "sources of volumes cannot be read by their home",
            Self::ProgramMissing => "programs do not exist",
            Self::ProgramIsDirectory => "programs are directories",
            Self::ProgramNotExecutable => "programs have no permission to run",
            Self::InterpreterMissing => "interpreters of scripts do not exist on this machine",
            Self::RequiredFileMissing => "required files do not exist",
            Self::ArgumentMissing => "arguments name files that do not exist",
            Self::TargetIsDirectory => "extracts would replace directories",
            Self::TargetIsFile => "directories of sets are files",
            Self::TargetBelowFile => "extracts go below files",
            Self::TooMuchMemory => "jobs ask for more memory than any node has",
            Self::TooMuchDisk => "jobs ask for more space in /tmp than any node has",
            Self::RootIsFile => "roots of jobs are files",
            Self::RootIsEnvironment => "roots of jobs are environments without a system",
            Self::ProgramOnNoNode => "programs are on no node",
            Self::ProgramOnSomeNodes => {
                "programs are on some nodes only, and jobs may start on others"
            }
            Self::NotLookedAt => "places could not be looked at",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Self::SourceMissing => "correct the URL, or put the files there",
            Self::SourceUnreadable => "give the user of `bafs home` permission to read them",
            Self::ProgramMissing => "correct 'executable', or put the program there",
            Self::ProgramIsDirectory => "name the program inside",
            Self::ProgramNotExecutable => "run `chmod +x` on them, or name an 'interpreter'",
            Self::InterpreterMissing => "correct the '#!' line, or install the interpreter",
            Self::RequiredFileMissing => "correct 'requires', or put the files there",
            Self::ArgumentMissing => "correct the words, if they are meant as paths",
            Self::TargetIsDirectory => "name a file, or end the URL with '/' to send a set",
            Self::TargetIsFile => "choose a directory, or remove the file",
            Self::TargetBelowFile => "choose a directory, or remove the file",
            Self::TooMuchMemory => "ask for less, or add a larger node",
            Self::TooMuchDisk => "ask for less, or start nodes with a larger --tmp",
            Self::RootIsFile => "unpack the image with `bafs import image`, and name the directory",
            Self::RootIsEnvironment => {
                "mount it where it was made, with its bin on 'PATH'; or import an image that has it"
            }
            Self::ProgramOnNoNode | Self::ProgramOnSomeNodes => {
                "install them, write 'program NAME from URL', or give the jobs a 'root' with them"
            }
            Self::NotLookedAt => "give --local, or --identity and --catalog of a live cluster",
        }
    }

    fn is_error(self) -> bool {
        !matches!(
            self,
            Self::InterpreterMissing
                | Self::ArgumentMissing
                | Self::TooMuchMemory
                | Self::TooMuchDisk
                | Self::ProgramOnNoNode
                | Self::ProgramOnSomeNodes
                | Self::NotLookedAt
        )
    }
}

impl Finding {
    /// As a person reads it.
    pub(crate) fn describe(&self) -> String {
        let severity = if self.is_error { "error" } else { "warning" };
        let mut text = format!("{severity}: {} {}", self.places.len(), self.message);
        for place in self.places.iter().take(PLACES_SHOWN_MAX) {
            text += &format!("\n  {place}");
        }
        let more = self.places.len().saturating_sub(PLACES_SHOWN_MAX);
        if more > 0 {
            text += &format!("\n  and {more} more");
        }
        text + &format!("\n  to do: {}", self.remedy)
    }
}

/// Looks at all places that a workflow names. With `runs_here`, its jobs run on this machine.
pub(crate) fn find_faults(workflow: &Workflow, homes: &HomeView, runs_here: bool) -> Vec<Finding> {
    let mut search = FaultSearch {
        workflow,
        homes,
        known: BTreeMap::new(),
        found: BTreeMap::new(),
    };
    search.check_sources();
    search.check_roots();
    if !runs_here {
        search.check_nodes();
    }
    for job in &workflow.jobs {
        search.check_program(job, runs_here);
        search.check_files(job);
    }
    search.check_targets();
    search.check_resources();
    search.into_findings()
}

/// Looks for the programs that jobs expect on their nodes.
pub(crate) fn find_missing_programs(workflow: &Workflow, homes: &HomeView) -> Vec<Finding> {
    let mut search = FaultSearch {
        workflow,
        homes,
        known: BTreeMap::new(),
        found: BTreeMap::new(),
    };
    search.check_nodes();
    search.into_findings()
}

struct FaultSearch<'w> {
    workflow: &'w Workflow,
    homes: &'w HomeView,
    known: BTreeMap<Url, Result<FoundPath, LookupError>>,
    found: BTreeMap<FindingKind, Vec<String>>,
}

impl FaultSearch<'_> {
    fn into_findings(self) -> Vec<Finding> {
        let findings = self.found.into_iter().map(|(kind, places)| Finding {
            kind,
            is_error: kind.is_error(),
            message: kind.message(),
            places,
            remedy: kind.remedy(),
        });
        findings.collect()
    }

    /// Roots that no program could start in.
    fn check_roots(&mut self) {
        let roots = self.workflow.jobs.iter().filter_map(Job::root);
        let roots: BTreeSet<_> = roots.map(|mount| mount.volume).collect();
        for volume in roots {
            let volume = self.workflow.volume(volume);
            let VolumeKind::Cache { source, .. } = &volume.kind else {
                continue;
            };
            let place = format!("{source} (volume {})", volume.name);
            match self.look_up(source) {
                Some(Ok(found)) if !found.is_directory => {
                    self.add(FindingKind::RootIsFile, place);
                }
                Some(Ok(_)) => {
                    let mut has = |name: &str| {
                        let path = format!("{}/{name}", source.path.trim_end_matches('/'));
                        let below = Url {
                            path,
                            ..source.clone()
                        };
                        matches!(self.look_up(&below), Some(Ok(_)))
                    };
                    if has(ENVIRONMENT_MARK) && !SYSTEM_DIRECTORIES.into_iter().any(has) {
                        self.add(FindingKind::RootIsEnvironment, place);
                    }
                }
                _ => {}
            }
        }
    }

    /// Programs outside of volumes, which jobs expect on their nodes.
    fn check_nodes(&mut self) {
        let mut users: BTreeMap<&str, &str> = BTreeMap::new();
        for job in &self.workflow.jobs {
            let program = job.command.executable.as_str();
            let variables = &job.command.environment;
            let has_own_path = variables.iter().any(|(name, _)| name == "PATH");
            let is_name = !program.contains('/');
            let is_path = program.starts_with('/') && !is_in_volume(job, program);
            let is_expected = is_path || is_name && !has_own_path && !is_brought(job, program);
            if job.root().is_none() && is_expected {
                users.entry(program).or_insert(&job.name);
            }
        }
        let programs: Vec<String> = users.keys().map(|name| (*name).to_owned()).collect();
        let lacking = self.homes.nodes_without(&programs);
        for (program, job) in users {
            let kind = match lacking.get(program) {
                Some(NodesWithout::All) => FindingKind::ProgramOnNoNode,
                Some(NodesWithout::Some) => FindingKind::ProgramOnSomeNodes,
                None => continue,
            };
            self.add(kind, format!("{program} (job {job})"));
        }
    }

    fn add(&mut self, kind: FindingKind, place: String) {
        let places = self.found.entry(kind).or_default();
        if !places.contains(&place) {
            places.push(place);
        }
    }

    /// What is at a place; none when it cannot be told, which is noted once for each home.
    fn look_up(&mut self, url: &Url) -> Option<Result<FoundPath, LookupError>> {
        if !self.known.contains_key(url) {
            if self.known.len() >= LOOKUPS_MAX {
                let text = format!("all beyond the first {LOOKUPS_MAX}");
                self.add(FindingKind::NotLookedAt, text);
                return None;
            }
            let found = self.homes.stat(url);
            self.known.insert(url.clone(), found);
        }
        match self.known.get(url)?.clone() {
            Err(LookupError::Unknown(_)) => {
                let home = format!("{}://{}", url.scheme.name(), url.host);
                self.add(FindingKind::NotLookedAt, home);
                None
            }
            found => Some(found),
        }
    }

    fn check_sources(&mut self) {
        for volume in &self.workflow.volumes {
            let Some(source) = source_of(volume) else {
                continue;
            };
            let kind = match self.look_up(source) {
                Some(Err(LookupError::Missing)) => FindingKind::SourceMissing,
                Some(Err(LookupError::Unreadable)) => FindingKind::SourceUnreadable,
                _ => continue,
            };
            self.add(kind, format!("{source} (volume {})", volume.name));
        }
    }

    fn check_program(&mut self, job: &Job, runs_here: bool) {
        let program = &job.command.executable;
        let place = format!("{program} (job {})", job.name);
        let found = match self.place_at_home(job, program) {
            Some(url) => {
                let found = self.look_up(&url);
                let local = self.homes.local_path(&url);
                if let (Some(Ok(_)), Some(path)) = (&found, local)
                    && let Some(missing) = find_missing_interpreter(&path)
                {
                    let text = format!("{missing} ({place})");
                    self.add(FindingKind::InterpreterMissing, text);
                }
                found
            }
            None if runs_here && !is_in_volume(job, program) => find_on_machine(job, program),
            None => None,
        };
        let kind = match found {
            Some(Err(LookupError::Missing)) => FindingKind::ProgramMissing,
            Some(Ok(it)) if it.is_directory => FindingKind::ProgramIsDirectory,
            Some(Ok(it)) if it.mode & 0o111 == 0 => FindingKind::ProgramNotExecutable,
            _ => return,
        };
        self.add(kind, place);
    }

    fn check_files(&mut self, job: &Job) {
        for path in &job.command.required_files {
            if let Some(url) = self.place_at_home(job, path)
                && self.look_up(&url) == Some(Err(LookupError::Missing))
            {
                let place = format!("{path} (job {}): {url}", job.name);
                self.add(FindingKind::RequiredFileMissing, place);
            }
        }
        for word in job
            .command
            .arguments
            .iter()
            .filter(|it| it.starts_with('/'))
        {
            if let Some(url) = self.place_at_home(job, word)
                && self.look_up(&url) == Some(Err(LookupError::Missing))
                && self.source_is_there(job, word)
                && !self.is_prefix(&url)
            {
                let place = format!("{word} (job {}): {url}", job.name);
                self.add(FindingKind::ArgumentMissing, place);
            }
        }
    }

    fn check_targets(&mut self) {
        for extract in &self.workflow.extracts {
            let target = &extract.target;
            if let Some(Ok(found)) = self.look_up(target)
                && found.is_directory != extract.is_set()
            {
                let kind = match extract.is_set() {
                    true => FindingKind::TargetIsFile,
                    false => FindingKind::TargetIsDirectory,
                };
                self.add(kind, target.to_string());
            }
            let Some((parent, _)) = target
                .path
                .rsplit_once('/')
                .filter(|(it, _)| !it.is_empty())
            else {
                continue;
            };
            let above = Url {
                path: parent.to_owned(),
                ..target.clone()
            };
            if let Some(Ok(found)) = self.look_up(&above)
                && !found.is_directory
            {
                self.add(FindingKind::TargetBelowFile, target.to_string());
            }
        }
    }

    /// Nodes may be added later: what no node has now is no error.
    fn check_resources(&mut self) {
        let limits = |job: &Job| (job.memory_bytes, job.limits.temporary_bytes.unwrap_or(0));
        // Most workflows ask for nothing, and then no cluster is asked.
        if self.workflow.jobs.iter().all(|job| limits(job) == (0, 0)) {
            return;
        }
        let Some(most) = self.homes.largest_node() else {
            return;
        };
        for job in &self.workflow.jobs {
            let (memory, temporary) = limits(job);
            let name = &job.name;
            if most.memory_bytes.is_some_and(|most| memory > most) {
                let place = format!("{} (job {name})", format_bytes(memory.into()));
                self.add(FindingKind::TooMuchMemory, place);
            }
            if most.temporary_bytes.is_some_and(|most| temporary > most) {
                let place = format!("{} (job {name})", format_bytes(temporary.into()));
                self.add(FindingKind::TooMuchDisk, place);
            }
        }
    }

    /// The place of a job's path at home, if it is in a volume that holds what its home holds.
    fn place_at_home(&mut self, job: &Job, path: &str) -> Option<Url> {
        let (mount, below) = mount_of(job, path)?;
        let volume = self.workflow.volume(mount.volume);
        let is_cache = matches!(volume.kind, VolumeKind::Cache { .. });
        // A job that writes may make the file.
        let is_written = volume.users.iter().any(|user| {
            let mut mounts = self.workflow.job(*user).mounts.iter();
            mounts.any(|other| other.volume == mount.volume && other.writable)
        });
        let source = source_of(volume).filter(|_| is_cache || !is_written)?;
        if below.is_empty() {
            return None;
        }
        let is_directory = match self.look_up(source)? {
            Ok(found) => found.is_directory,
            Err(_) => return None,
        };
        let name = source.path.rsplit('/').next().unwrap_or("");
        let path = match is_directory {
            true => format!("{}/{below}", source.path.trim_end_matches('/')),
            // The volume holds the one file under its own name.
            false if below == name => source.path.clone(),
            false => format!("{}/{below}", source.path),
        };
        Some(Url {
            path,
            ..source.clone()
        })
    }

    fn source_is_there(&mut self, job: &Job, path: &str) -> bool {
        let volume = mount_of(job, path).map(|(mount, _)| self.workflow.volume(mount.volume));
        let source = volume.and_then(source_of);
        source.is_some_and(|source| matches!(self.look_up(source), Some(Ok(_))))
    }

    /// Whether files begin with a path, as those of an index that programs name by its stem.
    fn is_prefix(&self, url: &Url) -> bool {
        let Some((directory, name)) = url.path.rsplit_once('/') else {
            return false;
        };
        let place = Url {
            path: format!("{directory}/"),
            ..url.clone()
        };
        let listed = self.homes.list(&place, 1, &|_| true).unwrap_or_default();
        listed.iter().any(|entry| entry.path.starts_with(name))
    }
}

fn source_of(volume: &Volume) -> Option<&Url> {
    match &volume.kind {
        VolumeKind::Cache { source, .. } => Some(source),
        VolumeKind::Scratch { fill } => fill.as_ref(),
    }
}

/// The mount that a path lies in, and the path below it.
fn mount_of<'j>(job: &'j Job, path: &'j str) -> Option<(&'j Mount, &'j str)> {
    let mount = job.mount_at(path)?;
    let below = path.strip_prefix(&mount.path)?;
    Some((mount, below.trim_matches('/')))
}

/// Whether the workflow brings a program of this name to the job.
fn is_brought(job: &Job, program: &str) -> bool {
    let place = format!("{PROGRAM_DIRECTORY}/{program}");
    job.mounts.iter().any(|mount| mount.path == place)
}

fn is_in_volume(job: &Job, path: &str) -> bool {
    mount_of(job, path).is_some()
}

/// A program of this machine: by its path, or on the `PATH` that the job inherits.
fn find_on_machine(job: &Job, program: &str) -> Option<Result<FoundPath, LookupError>> {
    let stat = |path: &Path| {
        let found = path.metadata().ok()?;
        Some(FoundPath {
            is_directory: found.is_dir(),
            mode: found.permissions().mode() & 0o7777,
        })
    };
    if program.starts_with('/') {
        return Some(stat(Path::new(program)).ok_or(LookupError::Missing));
    }
    let has_own_path = job
        .command
        .environment
        .iter()
        .any(|(name, _)| name == "PATH");
    // Another system has its own programs, and a volume may bring this one.
    let is_elsewhere = job.root().is_some() || is_brought(job, program);
    if program.contains('/') || has_own_path || is_elsewhere {
        return None;
    }
    let path = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&path).filter_map(|directory| {
        let found = stat(&directory.join(program))?;
        (!found.is_directory && found.mode & 0o111 != 0).then_some(found)
    });
    Some(found.next().ok_or(LookupError::Missing))
}

/// The interpreter of a script's `#!` line that is not on this machine.
fn find_missing_interpreter(script: &Path) -> Option<String> {
    let mut start = Vec::new();
    let file = File::open(script).ok()?;
    file.take(SHEBANG_BYTES as u64)
        .read_to_end(&mut start)
        .ok()?;
    let line = start.strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n').next()?;
    let interpreter = std::str::from_utf8(line).ok()?.split_whitespace().next()?;
    let is_missing = interpreter.starts_with('/') && !Path::new(interpreter).exists();
    is_missing.then(|| interpreter.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_workflow::parse_workflow;

    use super::*;

    fn faults_of(text: &str, directory: &Path) -> Vec<Finding> {
        let none = |path: &str| Err(path.to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).expect("it is right");
        let homes = HomeView::Directory(directory.to_owned());
        find_faults(&workflow.workflow, &homes, true)
    }

    fn kinds(findings: &[Finding]) -> Vec<FindingKind> {
        findings.iter().map(|finding| finding.kind).collect()
    }

    #[test]
    fn missing_sources_are_grouped() {
        let home = tempfile::tempdir().expect("a directory");
        fs::write(home.path().join("in1"), "x").expect("write");
        let text = "for i in 1..9\nvolume v$(i) scratch 1 MB from bafs://home/in$(i)\n\
                    job a$(i) {\nexecutable = sh\n}\nmount v$(i) a$(i) /in ro\nend\n";
        let found = faults_of(text, home.path());
        assert_eq!(kinds(&found), [FindingKind::SourceMissing]);
        assert_eq!(found[0].places.len(), 8);
        let told = found[0].describe();
        let first =
            "error: 8 sources of volumes are not at their home\n  bafs://home/in2 (volume v2)";
        assert!(told.starts_with(first), "{told}");
        assert!(told.contains("and 3 more"), "{told}");
    }

    #[test]
    fn programs_of_volumes_are_checked() {
        let home = tempfile::tempdir().expect("a directory");
        let tools = home.path().join("tools");
        fs::create_dir_all(tools.join("dir")).expect("mkdir");
        fs::write(tools.join("plain"), "x").expect("write");
        fs::write(tools.join("script"), "#!/none/python3 -u\n").expect("write");
        let runs = fs::Permissions::from_mode(0o755);
        fs::set_permissions(tools.join("script"), runs).expect("chmod");
        let mut text = "volume t cache bafs://home/tools 1 MB\n".to_owned();
        for name in ["dir", "plain", "script", "none"] {
            text += &format!("job {name} {{\nexecutable = /t/{name}\n}}\nmount t {name} /t\n");
        }
        text += "job other {\nexecutable = no-such-program-9\n}\n";
        let found = faults_of(&text, home.path());
        assert_eq!(
            kinds(&found),
            [
                FindingKind::ProgramMissing,
                FindingKind::ProgramIsDirectory,
                FindingKind::ProgramNotExecutable,
                FindingKind::InterpreterMissing,
            ]
        );
        assert_eq!(
            found[0].places,
            ["/t/none (job none)", "no-such-program-9 (job other)"]
        );
    }

    #[test]
    fn arguments_and_required_files_are_checked() {
        let home = tempfile::tempdir().expect("a directory");
        fs::write(home.path().join("db.idx"), "x").expect("write");
        let text = "volume d cache bafs://home/ 1 MB\nvolume w scratch 1 MB\n\
                    mount d a /d\nmount w a /w\njob a {\nexecutable = sh\n\
                    arguments = /d/db /d/none.fa /w/new /other\nrequires = /d/db.idx /d/b\n}\n";
        let found = faults_of(text, home.path());
        let expected = [
            FindingKind::RequiredFileMissing,
            FindingKind::ArgumentMissing,
        ];
        assert_eq!(kinds(&found), expected);
        assert_eq!(found[0].places, ["/d/b (job a): bafs://home/b"]);
        assert_eq!(found[1].places, ["/d/none.fa (job a): bafs://home/none.fa"]);
    }

    #[test]
    fn memory_beyond_all_nodes_is_found() {
        let home = tempfile::tempdir().expect("a directory");
        let text = "job a {\nexecutable = sh\nrequest_memory = 900 PB\n}\n\
                    job b {\nexecutable = sh\nrequest_memory = 1 MB, 900 PB\n}\n";
        let found = faults_of(text, home.path());
        assert_eq!(kinds(&found), [FindingKind::TooMuchMemory]);
        assert_eq!(found[0].places.len(), 1, "the first value counts");
        assert!(!found[0].is_error);
    }

    #[test]
    fn targets_must_be_files_in_directories() {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join("dir")).expect("mkdir");
        fs::write(home.path().join("file"), "x").expect("write");
        fs::write(home.path().join("file2"), "x").expect("write");
        let text = "volume w scratch 1 MB\nmount w a /w\njob a {\nexecutable = sh\n}\n\
                    extract w x bafs://home/dir\nextract w y bafs://home/file2/y\n\
                    extract w q s3://bucket/q\nextract w *.z bafs://home/file/\n";
        let found = faults_of(text, home.path());
        assert_eq!(
            kinds(&found),
            [
                FindingKind::TargetIsDirectory,
                FindingKind::TargetIsFile,
                FindingKind::TargetBelowFile,
                FindingKind::NotLookedAt,
            ]
        );
        assert_eq!(found[3].places, ["s3://bucket"]);
    }
}
