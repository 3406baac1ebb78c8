//! Files of this machine that jobs name outside of volumes: programs, scripts, and others that are
//! words of a description. Decides nothing.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bafs_proto::path::{PROGRAM_DIRECTORY, is_in_kernel_directory};
use bafs_sched::earlier_work::{NamedFiles, ProgramIdentity};
use bafs_workflow::{Job, JobIndex, SHARED_DIRECTORIES, Workflow};

/// Programs and other files of jobs, as far as this machine has them.
type HostFiles = (
    BTreeMap<JobIndex, ProgramIdentity>,
    BTreeMap<JobIndex, NamedFiles>,
);

/// Finds the files of this machine that the jobs of a workflow name.
pub(super) fn find_host_files(workflow: &Workflow) -> HostFiles {
    let mut known = KnownFiles::default();
    let (mut programs, mut files) = HostFiles::default();
    for (job, index) in workflow.jobs.iter().zip(0u32..) {
        if let Some(found) = find_program(job).and_then(|path| known.identify(path)) {
            programs.insert(JobIndex(index), found);
        }
        let named = named_paths(job).filter_map(|path| known.identify(PathBuf::from(path)));
        let named: Vec<ProgramIdentity> = named.collect();
        if !named.is_empty() {
            files.insert(JobIndex(index), NamedFiles(named));
        }
    }
    (programs, files)
}

/// What was looked at so far: many jobs name the same files.
#[derive(Default)]
struct KnownFiles(BTreeMap<PathBuf, Option<ProgramIdentity>>);

impl KnownFiles {
    fn identify(&mut self, path: PathBuf) -> Option<ProgramIdentity> {
        let found = self.0.entry(path).or_insert_with_key(|path| {
            let found = path.metadata().ok().filter(|it| it.is_file())?;
            let ns =
                |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
            Some(ProgramIdentity {
                path: path.to_string_lossy().into_owned(),
                size: found.size(),
                mtime_ns: ns(found.mtime(), found.mtime_nsec()),
                ctime_ns: ns(found.ctime(), found.ctime_nsec()),
            })
        });
        found.clone()
    }
}

/// Absolute paths of this machine that are words of a job's arguments, or what follows the `=` of
/// one, and those that it requires.
fn named_paths(job: &Job) -> impl Iterator<Item = &str> {
    let words = job
        .command
        .arguments
        .iter()
        .map(|word| match word.split_once('=') {
            Some((_, value)) if value.starts_with('/') => value,
            _ => word.as_str(),
        });
    let required = job.command.required_files.iter().map(String::as_str);
    words.chain(required).filter(|path| {
        let shared = &job.command.shared_directories;
        let mut private = SHARED_DIRECTORIES.iter();
        let is_private = private.any(|directory| {
            let is_shared = shared.iter().any(|other| other == directory);
            !is_shared && Path::new(path).starts_with(directory)
        });
        let is_elsewhere = is_private || is_in_kernel_directory(Path::new(path));
        path.starts_with('/') && !is_elsewhere && job.mount_at(path).is_none()
    })
}

fn find_program(job: &Job) -> Option<PathBuf> {
    let program = Path::new(&job.command.executable);
    if program.is_absolute() {
        let is_in_volume = job.mount_at(&job.command.executable).is_some();
        return (!is_in_volume).then(|| program.to_owned());
    }
    // What a volume brings is an input of the job.
    let brought = format!("{PROGRAM_DIRECTORY}/{}", job.command.executable);
    let is_brought = job.root().is_some() || job.mount_at(&brought).is_some();
    if program.components().count() > 1 || is_brought {
        return None;
    }
    let mut variables = job.command.environment.iter();
    let own = variables.find(|(name, _)| name == "PATH");
    let path = own.map(|(_, value)| value.into());
    let path = path.or_else(|| std::env::var_os("PATH"))?;
    let mut places = std::env::split_paths(&path).map(|directory| directory.join(program));
    places.find(|place| {
        let found = place.metadata();
        found.is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn files_of_this_machine_are_found_in_words() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let place = directory.path().to_string_lossy().into_owned();
        for name in ["a.py", "b.txt", "lib.so", "in/x"] {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("it has one")).expect("mkdir");
            fs::write(path, "x").expect("write");
        }
        let text = format!(
            "volume c cache bafs://home/in 1 MB\nmount c a {place}/in\n\
             job a {{\nexecutable = sh\n\
             arguments = {place}/a.py --in={place}/b.txt {place}/none {place} /tmp/x b.txt \
             {place}/in/x /proc/cpuinfo -c \"cat {place}/a.py\"\n\
             requires = {place}/lib.so\n}}\n"
        );
        let none = |path: &str| Err(path.to_owned());
        let workflow = parse_workflow("w.bafs", &text, &none).expect("it is right");
        let (programs, files) = find_host_files(&workflow.workflow);
        assert!(programs[&JobIndex(0)].path.ends_with("/sh"));
        let found = files[&JobIndex(0)].0.iter();
        let found: Vec<&str> = found.map(|it| &it.path[place.len()..]).collect();
        assert_eq!(found, ["/a.py", "/b.txt", "/lib.so"]);
        assert!(files[&JobIndex(0)].0.iter().all(|it| it.ctime_ns != 0));
    }
}
