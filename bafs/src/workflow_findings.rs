//! What can be known of a workflow's files before anything runs: sources and programs that are not
//! at home, results that have no place there. It reads, and changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::path::is_program_place;
use bafs_proto::source::{SourceEntry, SourceKind};
use bafs_sched::earlier_work::{ListedPath, SourceState};
use bafs_workflow::{
    CheckedWorkflow, Job, JobIndex, Mount, Scheme, Url, Volume, VolumeKind, Workflow,
};

use crate::finding::{Finding, FindingKind};
use crate::home_view::{FoundPath, HomeView, LookupError, NodesWithout};
use crate::machine_programs::{
    brought_place, find_missing_interpreter, find_on_machine, is_brought,
};
use crate::units::format_bytes;

/// Places that are looked at: a call for each takes a millisecond, and nobody waits minutes.
const LOOKUPS_MAX: usize = 20_000;

/// What a conda environment has at its top, and no system has.
const ENVIRONMENT_MARK: &str = "conda-meta";

/// What an environment lacks that programs need: where the loader is, and the rest of a system.
const SYSTEM_DIRECTORIES: [&str; 2] = ["usr", "lib64"];

/// Where the jobs of a workflow would run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum JobMachine {
    /// On this one.
    This,
    /// On nodes, which have their own programs.
    Nodes,
    /// Nobody has said.
    Unknown,
}

/// What is to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlannedJobs<'p> {
    /// Those that run, of all of the workflow.
    pub(crate) running: &'p BTreeSet<JobIndex>,
    /// What homes have at the sources of volumes.
    pub(crate) sources: &'p BTreeMap<Url, SourceState>,
}

/// Looks at all places that a workflow names.
pub(crate) fn find_faults(
    checked: &CheckedWorkflow,
    homes: &HomeView,
    machine: JobMachine,
) -> Vec<Finding> {
    let workflow = &checked.workflow;
    let mut search = FaultSearch::new(workflow, homes, machine);
    search.check_places(&checked.interpreters);
    for job in &workflow.jobs {
        search.check_arguments(job);
    }
    search.check_targets();
    search.check_resources();
    search.into_findings()
}

/// Looks at what the jobs need that are to run. It asks no home again for what it listed.
pub(crate) fn find_run_faults(
    checked: &CheckedWorkflow,
    homes: &HomeView,
    machine: JobMachine,
    planned: PlannedJobs<'_>,
) -> Vec<Finding> {
    let mut search = FaultSearch::new(&checked.workflow, homes, machine);
    search.planned = Some(planned);
    search.check_homes();
    search.check_places(&checked.interpreters);
    search.into_findings()
}

struct FaultSearch<'w> {
    workflow: &'w Workflow,
    homes: &'w HomeView,
    machine: JobMachine,
    /// All jobs when there is none.
    planned: Option<PlannedJobs<'w>>,
    known: BTreeMap<Url, Result<FoundPath, LookupError>>,
    found: BTreeMap<FindingKind, Vec<String>>,
}

impl<'w> FaultSearch<'w> {
    fn new(workflow: &'w Workflow, homes: &'w HomeView, machine: JobMachine) -> Self {
        Self {
            workflow,
            homes,
            machine,
            planned: None,
            known: BTreeMap::new(),
            found: BTreeMap::new(),
        }
    }

    /// The jobs that are looked at.
    fn jobs(&self) -> impl Iterator<Item = (JobIndex, &'w Job)> + use<'w> {
        let planned = self.planned;
        let jobs = self.workflow.jobs.iter().zip(0u32..);
        let jobs = jobs.map(|(job, index)| (JobIndex(index), job));
        jobs.filter(move |(index, _)| planned.is_none_or(|it| it.running.contains(index)))
    }

    /// What jobs need before they start.
    fn check_places(&mut self, interpreters: &'w [(JobIndex, String)]) {
        self.check_sources();
        self.check_roots();
        if self.machine == JobMachine::Nodes {
            self.check_nodes(interpreters);
        }
        for (_, job) in self.jobs() {
            self.check_program(job);
            self.check_required_files(job);
        }
        if self.machine != JobMachine::Nodes {
            self.check_interpreters(interpreters);
        }
    }

    fn into_findings(self) -> Vec<Finding> {
        let findings = self.found.into_iter();
        findings
            .map(|(kind, places)| Finding::new(kind, places))
            .collect()
    }

    /// Roots that no program could start in.
    fn check_roots(&mut self) {
        let roots = self.jobs().filter_map(|(_, job)| job.root());
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

    /// The interpreters of those jobs that are looked at.
    fn scripts<'i>(
        &self,
        interpreters: &'i [(JobIndex, String)],
    ) -> impl Iterator<Item = (&'w Job, &'i str)> + use<'w, 'i> {
        let (planned, workflow) = (self.planned, self.workflow);
        let is_planned =
            move |index: &JobIndex| planned.is_none_or(|it| it.running.contains(index));
        let started = interpreters
            .iter()
            .filter(move |(index, _)| is_planned(index));
        started.map(move |(index, program)| (workflow.job(*index), program.as_str()))
    }

    /// Programs outside of volumes, which jobs expect on their nodes, and interpreters of scripts.
    fn check_nodes(&mut self, interpreters: &'w [(JobIndex, String)]) {
        let mut users: BTreeMap<&str, &str> = BTreeMap::new();
        let own = self.jobs();
        let own = own.map(|(_, job)| (job, job.command.executable.as_str()));
        let started = self.scripts(interpreters);
        for (job, program) in own.chain(started) {
            if is_expected(job, program) {
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
            let found = self.find(url);
            self.known.insert(url.clone(), found);
        }
        match self.known.get(url)?.clone() {
            Err(LookupError::Unknown(_)) if self.homes.lacks_home(url) => {
                self.add(FindingKind::HomeUnknown, format!("bafs://{}/", url.host));
                None
            }
            Err(LookupError::Unknown(_) | LookupError::Away) if self.homes.is_unlisted(url) => {
                self.add(FindingKind::HomeNotListed, format!("bafs://{}/", url.host));
                None
            }
            Err(LookupError::Unknown(_)) => {
                self.add(FindingKind::NotLookedAt, home_name(url));
                None
            }
            Err(LookupError::Away) => {
                self.add(FindingKind::HomeAway, home_name(url));
                None
            }
            found => Some(found),
        }
    }

    /// What is at a place that was not looked for yet.
    fn find(&self, url: &Url) -> Result<FoundPath, LookupError> {
        // Nobody waits for it again and again.
        let away = self.found.get(&FindingKind::HomeAway);
        if away.is_some_and(|homes| homes.contains(&home_name(url))) {
            return Err(LookupError::Away);
        }
        let listed = self.planned.map(|planned| planned.sources);
        // This machine also says what may be read.
        let listed = listed.filter(|_| self.homes.local_path(url).is_none());
        let found = listed.and_then(|sources| find_listed(sources, url));
        found.unwrap_or_else(|| self.homes.stat(url))
    }

    fn check_sources(&mut self) {
        let planned = self.planned;
        let is_read = |volume: &&Volume| {
            let mut users = volume.users.iter();
            planned.is_none_or(|it| users.any(|user| it.running.contains(user)))
        };
        for volume in self.workflow.volumes.iter().filter(is_read) {
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

    fn check_program(&mut self, job: &Job) {
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
            None if self.machine == JobMachine::Nodes || is_in_volume(job, program) => None,
            None => match (find_on_machine(job, program), self.machine) {
                (Some(Err(LookupError::Missing)), JobMachine::Unknown) => {
                    self.add(FindingKind::ProgramNotHere, place);
                    return;
                }
                (found, _) => found,
            },
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
        let kind = match self.machine {
            JobMachine::Unknown => FindingKind::ProgramNotHere,
            JobMachine::This | JobMachine::Nodes => FindingKind::ProgramMissing,
        };
        for (job, interpreter) in self.scripts(interpreters) {
            let is_here = !is_in_volume(job, interpreter);
            if is_here && find_on_machine(job, interpreter) == Some(Err(LookupError::Missing)) {
                let place = format!("{interpreter} (interpreter of job {})", job.name);
                self.add(kind, place);
            }
        }
    }

    fn check_required_files(&mut self, job: &Job) {
        for path in &job.command.required_files {
            if let Some(url) = self.place_at_home(job, path)
                && self.look_up(&url) == Some(Err(LookupError::Missing))
            {
                let place = format!("{path} (job {}): {url}", job.name);
                self.add(FindingKind::RequiredFileMissing, place);
            }
        }
    }

    fn check_arguments(&mut self, job: &Job) {
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

/// What a home listed at a place, if it listed that.
fn find_listed(
    sources: &BTreeMap<Url, SourceState>,
    url: &Url,
) -> Option<Result<FoundPath, LookupError>> {
    let found = |entry: &SourceEntry| match entry.kind {
        SourceKind::UnreadableDirectory => Err(LookupError::Unreadable),
        _ => Ok(FoundPath {
            is_directory: entry.kind == SourceKind::Directory,
            mode: entry.mode,
        }),
    };
    let is_bafs = url.scheme == Scheme::Bafs;
    let (mut source, mut below) = (url.clone(), String::new());
    loop {
        match sources.get(&source) {
            Some(SourceState::Listed(listing)) => {
                return match listing.find_path(&below) {
                    ListedPath::Entry(entry) => Some(found(entry)),
                    ListedPath::Missing => Some(Err(LookupError::Missing)),
                    ListedPath::Unlisted => None,
                };
            }
            Some(SourceState::Missing) => return Some(Err(LookupError::Missing)),
            Some(SourceState::Unreadable(_)) if is_bafs => {
                return Some(Err(LookupError::Unreadable));
            }
            Some(SourceState::Unknown(_)) if is_bafs => return Some(Err(LookupError::Away)),
            // Nodes may have other rights there than this machine.
            Some(SourceState::Unreadable(why) | SourceState::Unknown(why)) => {
                return Some(Err(LookupError::Unknown(why.clone())));
            }
            None => {}
        }
        let (above, name) = source.path.rsplit_once('/')?;
        if name.is_empty() {
            return None;
        }
        below = match below.is_empty() {
            true => name.to_owned(),
            false => format!("{name}/{below}"),
        };
        source.path = match above {
            "" => "/".to_owned(),
            above => above.to_owned(),
        };
    }
}

fn source_of(volume: &Volume) -> Option<&Url> {
    match &volume.kind {
        VolumeKind::Cache { source, .. } => Some(source),
        VolumeKind::Scratch { fill } => fill.as_ref(),
    }
}

fn home_name(url: &Url) -> String {
    format!("{}://{}", url.scheme.name(), url.host)
}

/// The mount that a path lies in, and the path below it.
fn mount_of<'j>(job: &'j Job, path: &'j str) -> Option<(&'j Mount, &'j str)> {
    let mount = job.mount_at(path)?;
    let below = path.strip_prefix(&mount.path)?;
    Some((mount, below.trim_matches('/')))
}

/// Whether a job finds a program of this name on its node, or nowhere.
fn is_expected(job: &Job, program: &str) -> bool {
    let mut variables = job.command.environment.iter();
    let has_own_path = variables.any(|(name, _)| name == "PATH");
    let is_name = !program.contains('/');
    let is_path = program.starts_with('/') && !is_in_volume(job, program);
    let is_here = is_path || is_name && !has_own_path && !is_brought(job, program);
    job.root().is_none() && is_here
}

/// Whether a path is where a volume is mounted, which is a directory.
fn is_mount_point(job: &Job, path: &str) -> bool {
    let mut mounts = job.mounts.iter();
    mounts.any(|mount| mount.path == path && !is_program_place(path))
}

fn is_in_volume(job: &Job, path: &str) -> bool {
    mount_of(job, path).is_some()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use bafs_workflow::parse_workflow;

    use super::*;

    fn faults_of(text: &str, directory: &Path) -> Vec<Finding> {
        let none = |path: &str| Err(path.to_owned());
        let checked = parse_workflow("w.bafs", text, &none).expect("it is right");
        let homes = HomeView::Directory(directory.to_owned());
        find_faults(&checked, &homes, JobMachine::This)
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
