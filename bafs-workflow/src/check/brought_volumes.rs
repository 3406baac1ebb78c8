//! Volumes that jobs have by other statements than `mount`: roots, and programs that travel.

use bafs_proto::path::ROOT_PATH;

use super::WorkflowChecker;
use crate::ast::{ProgramDeclaration, RootDeclaration};
use crate::model::{JobIndex, VolumeIndex};
use crate::programs::{cache_of_program, is_run_by, read_only_mount};

impl WorkflowChecker<'_> {
    /// Gives each job its root directory, at most one.
    pub(super) fn mount_roots(&mut self, declarations: &[RootDeclaration]) {
        for RootDeclaration { volume, jobs } in declarations {
            let volume_index = self.find_volume(volume);
            for job in jobs {
                let (Some(volume_index), Some(index)) = (volume_index, self.find_job(job)) else {
                    continue;
                };
                let known = self.workflow.job(index).root();
                if let Some(other) = known.map(|mount| mount.volume) {
                    let other = &self.workflow.volume(other).name;
                    let message = format!("job '{}' has the root '{other}' already", job.text);
                    let hint = "a job has one root; 'mount' shows other volumes below it";
                    self.diagnostics.error_hint(job.location, message, hint);
                    continue;
                }
                let root = read_only_mount(volume_index, ROOT_PATH.to_owned());
                self.add_mount(index, root, job.location);
            }
        }
    }

    /// Makes a cache volume of each program, and mounts it in the jobs that run it.
    pub(super) fn bring_programs(&mut self, programs: Vec<ProgramDeclaration>) {
        for program in programs {
            let (name, location) = (program.name.text.clone(), program.name.location);
            let jobs = self.workflow.jobs.iter().zip(&self.notes).zip(0u32..);
            let users = jobs
                .filter(|((job, notes), _)| is_run_by(&name, &job.command, notes.script.as_ref()));
            let users: Vec<JobIndex> = users.map(|(_, index)| JobIndex(index)).collect();
            if users.is_empty() {
                let message = format!("no job runs the program '{name}'");
                let hint = "name it as an executable, or as a word of a script; or remove it";
                self.diagnostics.warn(location, message, hint);
                continue;
            }
            let volume = cache_of_program(program);
            if !self.volumes.declare(&volume.name, self.diagnostics) {
                self.is_complete = false;
                continue;
            }
            let (index, path) = (self.workflow.volumes.len() as u32, volume.path);
            self.workflow.volumes.push(volume.volume);
            for job in users {
                let mount = read_only_mount(VolumeIndex(index), path.clone());
                self.add_mount(job, mount, location);
            }
        }
    }
}
