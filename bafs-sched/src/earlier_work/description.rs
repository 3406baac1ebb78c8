//! What of a workflow decides what a job makes. Names of volumes, priorities, retries and estimates
//! do not: a scratch volume is known by who writes it, and where. Declared sizes are compared
//! apart, since to declare one that was unknown changes nothing.

use bafs_proto::file_set::FileSelection;
use bafs_proto::hash::Digest;
use bafs_workflow::{Extract, Job, JobIndex, Volume, VolumeIndex, VolumeKind, Workflow};

use crate::space::Space;

/// Most descriptions have fewer bytes.
const PARTS_BYTES: usize = 1_024;

/// Positions of the extracts of each volume.
#[derive(Debug, Clone)]
pub struct ExtractIndex(Vec<Vec<u32>>);

impl ExtractIndex {
    /// Of a workflow.
    pub fn new(workflow: &Workflow) -> Self {
        let mut of_volume = vec![Vec::new(); workflow.volumes.len()];
        for (extract, position) in workflow.extracts.iter().zip(0u32..) {
            of_volume[extract.volume.as_usize()].push(position);
        }
        Self(of_volume)
    }

    /// The extracts of a volume.
    pub fn of(&self, volume: VolumeIndex) -> &[u32] {
        &self.0[volume.as_usize()]
    }
}

/// The digest of a job's command, environment, mounts, and of the files that its volumes send home,
/// whose positions `extracts_of` tells. `producers` are the jobs whose output it reads.
pub fn describe_job_digest<'e>(
    workflow: &Workflow,
    job: JobIndex,
    producers: &[JobIndex],
    extracts_of: impl Fn(VolumeIndex) -> &'e [u32],
) -> Digest {
    let job = workflow.job(job);
    let mut parts = Parts(Vec::with_capacity(PARTS_BYTES));
    parts.add_command(job);
    for mount in &job.mounts {
        parts.add("mount");
        parts.add(&mount.path);
        parts.add(if mount.writable { "rw" } else { "ro" });
        match &workflow.volume(mount.volume).kind {
            VolumeKind::Cache { source, .. } => parts.add(&format!("cache {source}")),
            VolumeKind::Scratch { fill } => {
                match fill {
                    Some(source) => parts.add(&format!("filled {source}")),
                    None => parts.add("scratch"),
                }
                parts.add_writers(workflow, mount.volume, producers);
            }
        }
        if !mount.writable {
            continue;
        }
        for position in extracts_of(mount.volume) {
            let extract = &workflow.extracts[*position as usize];
            parts.add_extract(extract);
        }
    }
    Digest::of(&parts.0)
}

/// The scratch volumes that a job writes, in the order of its mounts.
pub fn written_volumes(
    workflow: &Workflow,
    job: JobIndex,
) -> impl Iterator<Item = (&Volume, Space)> {
    let written = workflow
        .job(job)
        .mounts
        .iter()
        .filter(|mount| mount.writable);
    let volumes = written.map(move |mount| workflow.volume(mount.volume));
    volumes.map(|volume| {
        let (bytes, files) = (volume.size_bytes, volume.size_files);
        (volume, Space { bytes, files })
    })
}

/// Texts with their lengths, so that none runs into the next. They are hashed at once: they are
/// many and short.
struct Parts(Vec<u8>);

impl Parts {
    fn add(&mut self, text: &str) {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
    }

    /// A list with its name and length, so that no element passes for one of the next list.
    fn add_list<T: AsRef<str>>(&mut self, name: &str, texts: impl IntoIterator<Item = T>) {
        let texts: Vec<T> = texts.into_iter().collect();
        self.add(name);
        self.0.extend((texts.len() as u64).to_le_bytes());
        texts.iter().for_each(|text| self.add(text.as_ref()));
    }

    fn add_extract(&mut self, extract: &Extract) {
        self.add_list("extract", [&extract.path, &extract.target.to_string()]);
        for selection in &extract.selections {
            self.add(match selection {
                FileSelection::File(_) => "file",
                FileSelection::Directory(_) => "directory",
                FileSelection::Pattern(_) => "pattern",
            });
            self.add(selection.path());
        }
    }

    /// Which of these jobs write a volume, and where each of them has it.
    fn add_writers(&mut self, workflow: &Workflow, volume: VolumeIndex, jobs: &[JobIndex]) {
        let jobs = jobs.iter().map(|job| workflow.job(*job));
        let mut writers: Vec<(&str, &str)> = jobs
            .flat_map(|job| {
                let mounts = job.mounts.iter();
                let written = mounts.filter(|mount| mount.writable && mount.volume == volume);
                written.map(|mount| (job.name.as_str(), mount.path.as_str()))
            })
            .collect();
        writers.sort_unstable();
        for (writer, path) in writers {
            self.add("writer");
            self.add(writer);
            self.add(path);
        }
    }

    fn add_command(&mut self, job: &Job) {
        let command = &job.command;
        self.add(&command.executable);
        self.add_list("arguments", &command.arguments);
        let variables = command.environment.iter();
        let variables = variables.map(|(name, value)| format!("{name}={value}"));
        self.add_list("environment", variables);
        self.add_list("directory", [&command.directory]);
        self.add_list("output", &command.stdout);
        self.add_list("error", &command.stderr);
        self.add_list("requires", &command.required_files);
        self.add_list("produces", &command.produced_files);
        self.add_list("share", &command.shared_directories);
    }
}
