//! What can be known of a workflow's files before anything runs: sources and programs that are not
//! at home, results that have no place there. It reads, and changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bafs_proto::path::{PROGRAM_DIRECTORY, is_program_place};
use bafs_workflow::{CheckedWorkflow, Job, JobIndex, Mount, Url, Volume, VolumeKind, Workflow};

use crate::finding::{Finding, FindingKind};
use crate::home_view::{FoundPath, HomeView, LookupError, NodesWithout};
use crate::units::format_bytes;

/// Places that are looked at: a call for each takes a millisecond, and nobody waits minutes.
const LOOKUPS_MAX: usize = 20_000;

/// Bytes of a script that are read for its `#!` line: what the kernel reads.
const SHEBANG_BYTES: usize = 256;

/// What a conda environment has at its top, and no system has.
const ENVIRONMENT_MARK: &str = "conda-meta";

/// What an environment lacks that programs need: where the loader is, and the rest of a system.
const SYSTEM_DIRECTORIES: [&str; 2] = ["usr", "lib64"];

/// Looks at all places that a workflow names. With `runs_here`, its jobs run on this machine.
pub(crate) fn find_faults(
    checked: &CheckedWorkflow,
    homes: &HomeView,
    runs_here: bool,
) -> Vec<Finding> {
    let workflow = &checked.workflow;
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
    if runs_here {
        search.check_interpreters(&checked.interpreters);
    }
    search.check_targets();
    search.check_resources();
    search.into_findings()
}

/// Looks for the homes that a workflow names, and for the programs that jobs expect on their nodes.
pub(crate) fn find_missing_servers(workflow: &Workflow, homes: &HomeView) -> Vec<Finding> {
    let mut search = FaultSearch {
        workflow,
        homes,
        known: BTreeMap::new(),
        found: BTreeMap::new(),
    };
    search.check_homes();
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
        let findings = self.found.into_iter();
        findings
            .map(|(kind, places)| Finding::new(kind, places))
            .collect()
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

    /// Homes of which the catalog lists none of their name.
    fn check_homes(&mut self) {
        let workflow = self.workflow;
        for url in workflow.urls() {
            if self.homes.is_unlisted(url) {
                self.add(FindingKind::HomeNotListed, format!("bafs://{}/", url.host));
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
            Err(LookupError::Unknown(_)) if self.homes.lacks_home(url) => {
                self.add(FindingKind::HomeUnknown, format!("bafs://{}/", url.host));
                None
            }
            Err(LookupError::Unknown(_)) if self.homes.is_unlisted(url) => {
                self.add(FindingKind::HomeNotListed, format!("bafs://{}/", url.host));
                None
            }
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
        let place = format!("{} (job {})", job.command.executable, job.name);
        let brought = brought_place(&job.command.executable);
        let program = match job.mounts.iter().any(|mount| mount.path == brought) {
            true => &brought,
            false => &job.command.executable,
        };
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
            None if is_mount_point(job, program) => Some(Ok(FoundPath {
                is_directory: true,
                mode: 0,
            })),
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

    /// Interpreters of scripts that a shell starts on this machine.
    fn check_interpreters(&mut self, interpreters: &[(JobIndex, String)]) {
        for (index, interpreter) in interpreters {
            let job = self.workflow.job(*index);
            let is_here = !is_in_volume(job, interpreter);
            if is_here && find_on_machine(job, interpreter) == Some(Err(LookupError::Missing)) {
                let place = format!("{interpreter} (interpreter of job {})", job.name);
                self.add(FindingKind::ProgramMissing, place);
            }
        }
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
            // What a workflow brings is a file, whatever its source is called.
            return is_program_place(&mount.path).then(|| source.clone());
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

/// Where a job has a program of this name that its workflow brings.
fn brought_place(program: &str) -> String {
    format!("{PROGRAM_DIRECTORY}/{program}")
}

/// Whether the workflow brings a program of this name to the job.
fn is_brought(job: &Job, program: &str) -> bool {
    let place = brought_place(program);
    job.mounts.iter().any(|mount| mount.path == place)
}

/// Whether a path is where a volume is mounted, which is a directory.
fn is_mount_point(job: &Job, path: &str) -> bool {
    let mut mounts = job.mounts.iter();
    mounts.any(|mount| mount.path == path && !is_program_place(path))
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
    let mut words = std::str::from_utf8(line).ok()?.split_whitespace();
    let interpreter = words.next()?;
    if interpreter.starts_with('/') && !Path::new(interpreter).exists() {
        return Some(interpreter.to_owned());
    }
    // `env` looks for the next word that is neither an option nor a variable.
    let is_env = interpreter.rsplit('/').next() == Some("env");
    let named = words.find(|word| !word.starts_with('-') && !word.contains('='));
    let named = named.filter(|_| is_env)?;
    let path = std::env::var_os("PATH")?;
    let is_missing = !std::env::split_paths(&path).any(|it| it.join(named).is_file());
    is_missing.then(|| named.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_workflow::parse_workflow;

    use super::*;

    fn faults_of(text: &str, directory: &Path) -> Vec<Finding> {
        let none = |path: &str| Err(path.to_owned());
        let checked = parse_workflow("w.bafs", text, &none).expect("it is right");
        let homes = HomeView::Directory(directory.to_owned());
        find_faults(&checked, &homes, true)
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
        let runs = fs::Permissions::from_mode(0o755);
        for (name, line) in [
            ("script", "/none/python3 -u"),
            ("env", "/usr/bin/env -S none9 -u"),
        ] {
            fs::write(tools.join(name), format!("#!{line}\n")).expect("write");
            fs::set_permissions(tools.join(name), runs.clone()).expect("chmod");
        }
        let mut text = "volume t cache bafs://home/tools 1 MB\n".to_owned();
        for name in ["dir", "plain", "script", "env", "none"] {
            text += &format!("job {name} {{\nexecutable = /t/{name}\n}}\nmount t {name} /t\n");
        }
        text += "job other {\nexecutable = no-such-program-9\n}\n\
                 job mounted {\nexecutable = /t\n}\nmount t mounted /t\n\
                 job inline {\ninterpreter = none9\nscript = <<END\nx\nEND\n}\n\
                 program brought from bafs://home/tools/plain\njob b {\nexecutable = brought\n}\n";
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
        let places = |at: usize| found[at].places.join(", ");
        assert_eq!(
            places(0),
            "/t/none (job none), no-such-program-9 (job other), none9 (interpreter of job inline)"
        );
        assert_eq!(places(1), "/t/dir (job dir), /t (job mounted)");
        assert_eq!(places(2), "/t/plain (job plain), brought (job b)");
        let interpreters = "/none/python3 (/t/script (job script)), none9 (/t/env (job env))";
        assert_eq!(places(3), interpreters);
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

    #[test]
    fn home_that_a_local_run_lacks_is_told() {
        let home = tempfile::tempdir().expect("a directory");
        let text = "volume w scratch 1 MB\nmount w a /w\njob a {\nexecutable = sh\n}\n\
                    extract w x bafs://hom/x\n";
        let found = faults_of(text, home.path());
        assert_eq!(kinds(&found), [FindingKind::HomeUnknown]);
        assert_eq!(found[0].places, ["bafs://hom/"]);
    }
}
