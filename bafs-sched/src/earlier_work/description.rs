//! What of a workflow decides what a job makes. Sizes do not: a job that ran in a volume of another
//! size wrote the same. Neither do names of volumes, priorities, retries and estimates.

use bafs_proto::hash::{Digest, DigestHasher};
use bafs_workflow::{Job, JobIndex, VolumeIndex, VolumeKind, Workflow};

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
/// whose positions `extracts_of` tells.
pub fn describe_job_digest<'e>(
    workflow: &Workflow,
    job: JobIndex,
    extracts_of: impl Fn(VolumeIndex) -> &'e [u32],
) -> Digest {
    let job = workflow.job(job);
    let mut parts = Parts(DigestHasher::new());
    parts.add_command(job);
    for mount in &job.mounts {
        parts.add("mount");
        parts.add(&mount.path);
        parts.add(if mount.writable { "rw" } else { "ro" });
        match &workflow.volume(mount.volume).kind {
            VolumeKind::Cache { source, .. } => parts.add(&format!("cache {source}")),
            VolumeKind::Scratch { fill: Some(source) } => parts.add(&format!("filled {source}")),
            VolumeKind::Scratch { fill: None } => parts.add("scratch"),
        }
        if !mount.writable {
            continue;
        }
        for position in extracts_of(mount.volume) {
            let extract = &workflow.extracts[*position as usize];
            parts.add("extract");
            parts.add(&extract.path);
            parts.add(&extract.target.to_string());
        }
    }
    parts.0.digest()
}

/// Texts with their lengths, so that none runs into the next.
struct Parts(DigestHasher);

impl Parts {
    fn add(&mut self, text: &str) {
        self.0.update(&(text.len() as u64).to_le_bytes());
        self.0.update(text.as_bytes());
    }

    fn add_all<'t>(&mut self, name: &str, texts: impl Iterator<Item = &'t String>) {
        self.add(name);
        texts.for_each(|text| self.add(text));
    }

    fn add_command(&mut self, job: &Job) {
        let command = &job.command;
        self.add(&command.executable);
        self.add_all("arguments", command.arguments.iter());
        for (name, value) in &command.environment {
            self.add(&format!("{name}={value}"));
        }
        self.add_all("directory", std::iter::once(&command.directory));
        self.add_all("output", command.stdout.iter());
        self.add_all("error", command.stderr.iter());
        self.add_all("requires", command.required_files.iter());
        self.add_all("produces", command.produced_files.iter());
        self.add_all("share", command.shared_directories.iter());
    }
}
