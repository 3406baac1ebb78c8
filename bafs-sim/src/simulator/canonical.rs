//! The workflow of a canonical workload, job by job, without a text. It plans nothing.

use bafs_proto::volume::LimitKind;
use bafs_workflow::{
    CachePolicy, Extract, Job, JobIndex, JobLimits, Mount, ProgramSpec, Url, Volume, VolumeIndex,
    VolumeKind, Workflow,
};

use crate::planner::{CanonicalWorkload, PrivateLayout};

/// The workflow that a canonical workload describes: each depth reads one cache volume; the first
/// scratch volume of a pipeline is filled from home, and a file of the last one goes there.
pub fn build_canonical_workflow(canonical: &CanonicalWorkload) -> Workflow {
    let mut workflow = Workflow {
        name: "canonical".to_owned(),
        jobs: Vec::with_capacity(canonical.width as usize * canonical.depth as usize),
        volumes: Vec::new(),
        extracts: Vec::with_capacity(canonical.width as usize),
    };
    if canonical.batch_bytes > 0 {
        for depth in 0..canonical.depth {
            workflow.volumes.push(Volume {
                name: format!("b{depth}"),
                kind: VolumeKind::Cache {
                    source: home_url(format!("/b{depth}")),
                    // Scanned from end to end, where LRU finds nothing again once a part is lost.
                    policy: CachePolicy::Mru,
                    is_warmed: false,
                },
                size_bytes: canonical.batch_bytes,
                size_files: canonical.batch_files,
                limit: LimitKind::Exact,
                users: Vec::with_capacity(canonical.width as usize),
            });
        }
    }
    for pipeline in 0..canonical.width {
        add_pipeline(&mut workflow, canonical, pipeline);
    }
    workflow
}

fn add_pipeline(workflow: &mut Workflow, canonical: &CanonicalWorkload, pipeline: u32) {
    let first = workflow.volumes.len() as u32;
    let volumes = match (canonical.private_bytes, canonical.layout) {
        (0, _) => 0,
        (_, PrivateLayout::Chain) => canonical.depth + 1,
        (_, PrivateLayout::Shared) => 1,
    };
    for at in 0..volumes {
        let fill = (at == 0).then(|| home_url(format!("/in{pipeline}")));
        workflow.volumes.push(Volume {
            name: format!("p{pipeline}_{at}"),
            kind: VolumeKind::Scratch { fill },
            size_bytes: canonical.private_bytes,
            size_files: canonical.private_files,
            limit: LimitKind::Exact,
            users: Vec::new(),
        });
    }
    for depth in 0..canonical.depth {
        let index = JobIndex(workflow.jobs.len() as u32);
        let mut mounts = Vec::new();
        if canonical.batch_bytes > 0 {
            mounts.push((VolumeIndex(depth), "/batch", false));
        }
        if volumes > 1 {
            mounts.push((VolumeIndex(first + depth), "/in", false));
            mounts.push((VolumeIndex(first + depth + 1), "/out", true));
        } else if volumes == 1 {
            mounts.push((VolumeIndex(first), "/scratch", true));
        }
        for (volume, ..) in &mounts {
            workflow.volumes[volume.as_usize()].users.push(index);
        }
        let mounts = mounts.into_iter().map(|(volume, path, writable)| Mount {
            volume,
            path: path.to_owned(),
            writable,
            write_back: false,
        });
        let job = build_job(canonical, pipeline, depth, index, mounts.collect());
        workflow.jobs.push(job);
    }
    if volumes > 0 {
        workflow.extracts.push(Extract {
            volume: VolumeIndex(first + volumes - 1),
            path: "out".to_owned(),
            selections: Vec::new(),
            target: home_url(format!("/out{pipeline}")),
        });
    }
}

fn build_job(
    canonical: &CanonicalWorkload,
    pipeline: u32,
    depth: u32,
    at: JobIndex,
    mounts: Vec<Mount>,
) -> Job {
    let parent = (depth > 0).then(|| JobIndex(at.0 - 1));
    let child = (depth + 1 < canonical.depth).then(|| JobIndex(at.0 + 1));
    Job {
        name: format!("j{pipeline}_{depth}"),
        command: ProgramSpec {
            executable: "canonical".to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: "/".to_owned(),
            stdout: None,
            stderr: None,
            required_files: vec![],
            produced_files: vec![],
            shared_directories: Vec::new(),
        },
        cpus: 1,
        memory_bytes: 0,
        limits: JobLimits::default(),
        runtime_s: Some(canonical.run_s.round() as u64),
        retries: 0,
        priority: 0,
        mounts,
        parents: parent.into_iter().collect(),
        children: child.into_iter().collect(),
    }
}

fn home_url(path: String) -> Url {
    format!("bafs://home{path}")
        .parse()
        .expect("a plain path makes a URL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_workflow_is_recognised_as_canonical() {
        for layout in [PrivateLayout::Chain, PrivateLayout::Shared] {
            let text = "width=7,depth=3,batch=2GB,private=100MB,run=50s,var=0.1";
            let canonical = CanonicalWorkload {
                layout,
                batch_files: 20,
                private_files: 30,
                ..CanonicalWorkload::parse(text).unwrap()
            };
            let workflow = build_canonical_workflow(&canonical);
            assert_eq!(workflow.jobs.len(), 21);
            assert_eq!(CanonicalWorkload::recognise(&workflow, 0.1), Ok(canonical));
        }
    }
}
