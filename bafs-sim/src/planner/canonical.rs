//! Canonical workloads, and how one is recognised in a checked workflow. It does not say where
//! data fit or how long anything takes.
//!
//! | thesis (§4.2.2) | workflow |
//! |---|---|
//! | pipeline | jobs that `parent` or a scratch volume connects; a chain, all equally long |
//! | batch volume of a depth | the one cache volume that exactly the jobs of that depth mount |
//! | depth + 1 private volumes | scratch volumes of one size; job i mounts i and i + 1 |
//! | the same, [`PrivateLayout::Shared`] | one scratch volume that all jobs of the pipeline mount |
//!
//! A shared scratch volume replaces the private volumes of all levels: it exists as a whole from
//! the pipeline's first job to its last.

use std::collections::BTreeSet;

use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow, parse_duration, parse_size};
use serde::{Deserialize, Serialize};

use super::scratch_sizes::ScratchSizes;
use super::shape::{ConnectedPipelines, Shape};

/// Pipelines of a canonical workload that is described in words; more is a typing error.
const WIDTH_MAX: u32 = 1_000_000_000;
/// Jobs in a pipeline; more is a typing error.
const DEPTH_MAX: u32 = 1_000_000;

/// How a pipeline's private data are laid out in volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrivateLayout {
    /// `depth + 1` volumes; a running job holds two, a waiting pipeline one. The thesis' own.
    Chain,
    /// One volume for the whole pipeline.
    Shared,
}

/// `width` pipelines of `depth` jobs each (thesis §4.2.2).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CanonicalWorkload {
    /// Pipelines, at least one.
    pub width: u32,
    /// Jobs in each pipeline, at least one.
    pub depth: u32,
    /// Bytes of the batch volume that all jobs of one depth read; 0 when there is none.
    pub batch_bytes: u64,
    /// Bytes of one private volume.
    pub private_bytes: u64,
    /// Files that a batch volume has.
    pub batch_files: u64,
    /// Files that a private volume has room for.
    pub private_files: u64,
    /// Mean computing time of a job in seconds.
    pub run_s: f64,
    /// Standard deviation of the computing time as a share of its mean.
    pub variability: f64,
    /// How private data are laid out.
    pub layout: PrivateLayout,
}

/// Why a text describes no canonical workload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CanonicalParseError(String);

/// Why a workflow is not canonical.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not canonical because {0}")]
pub struct NotCanonicalError(String);

impl CanonicalWorkload {
    /// Reads `width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1`, in any order; `var`
    /// is 0 when it is left out.
    pub fn parse(text: &str) -> Result<Self, CanonicalParseError> {
        let (mut width, mut depth, mut batch, mut private) = (None, None, None, None);
        let (mut run, mut variability) = (None, None);
        // A comma behind the last part is no further one.
        let parts = text.trim_end().strip_suffix(',').unwrap_or(text);
        for part in parts.split(',') {
            let (key, value) = part.split_once('=').ok_or_else(|| {
                CanonicalParseError(format!("'{part}' is not of the form KEY=VALUE"))
            })?;
            let (key, value) = (key.trim(), value.trim());
            let wrong = |why: String| CanonicalParseError(format!("{key}={value}: {why}"));
            let size = |value| parse_size(value).map_err(|e| wrong(e.to_string()));
            let twice = match key {
                "width" => width
                    .replace(parse_number(value, WIDTH_MAX).map_err(wrong)?)
                    .is_some(),
                "depth" => depth
                    .replace(parse_number(value, DEPTH_MAX).map_err(wrong)?)
                    .is_some(),
                "batch" => batch.replace(size(value)?).is_some(),
                "private" => private.replace(size(value)?).is_some(),
                "run" => {
                    let run_s = parse_duration(value).map_err(|e| wrong(e.to_string()))?;
                    run.replace(run_s as f64).is_some()
                }
                "var" => variability
                    .replace(parse_fraction(value).map_err(wrong)?)
                    .is_some(),
                _ => {
                    return Err(wrong(
                        "unknown key; the keys are width, depth, batch, private, run, var".into(),
                    ));
                }
            };
            if twice {
                return Err(wrong("is given twice".into()));
            }
        }
        let missing = |key: &str| CanonicalParseError(format!("{key}=... is missing"));
        Ok(Self {
            width: width.ok_or_else(|| missing("width"))?,
            depth: depth.ok_or_else(|| missing("depth"))?,
            batch_bytes: batch.ok_or_else(|| missing("batch"))?,
            private_bytes: private.ok_or_else(|| missing("private"))?,
            batch_files: 1,
            private_files: 1,
            run_s: run.ok_or_else(|| missing("run"))?,
            variability: variability.unwrap_or(0.0),
            layout: PrivateLayout::Chain,
        })
    }

    /// Recognises a canonical workload; a workflow does not declare `variability`.
    ///
    /// Jobs must declare equal run times, as the model has but one.
    pub fn recognise(workflow: &Workflow, variability: f64) -> Result<Self, NotCanonicalError> {
        let pipelines = ConnectedPipelines::from_workflow(workflow);
        let depth = pipelines.members.first().map_or(0, Vec::len);
        let Some(first) = pipelines.members.first() else {
            return Err(NotCanonicalError("it has no jobs".into()));
        };
        let run_s = check_equal_jobs(workflow)?;
        let mut private = BTreeSet::new();
        for members in &pipelines.members {
            check_chain(workflow, members, depth)?;
            private.insert(measure_private_volumes(workflow, members)?);
        }
        let batch_bytes = measure_batch_volumes(workflow, &pipelines, first)?;
        let mut private = private.into_iter();
        let (Some(((private_bytes, private_files), shared)), None) =
            (private.next(), private.next())
        else {
            return Err(NotCanonicalError(
                "pipelines differ in their private volumes".into(),
            ));
        };
        Ok(Self {
            width: pipelines.members.len() as u32,
            depth: depth as u32,
            batch_bytes,
            private_bytes,
            batch_files: cache_files_max(workflow),
            private_files,
            run_s,
            variability,
            layout: if shared {
                PrivateLayout::Shared
            } else {
                PrivateLayout::Chain
            },
        })
    }

    /// Jobs of all pipelines.
    pub fn jobs(&self) -> u64 {
        u64::from(self.width) * u64::from(self.depth)
    }

    /// The workload's properties that strategies need; exact.
    pub fn shape(&self) -> Shape {
        let private = u128::from(self.private_bytes);
        let (running, waiting, kept, input_bytes) = match self.layout {
            PrivateLayout::Chain => {
                let kept = (u128::from(self.depth) + 1) * private;
                (2 * private, private, kept, self.private_bytes as f64)
            }
            // A whole volume passes a job at most: half of it read, half of it written.
            PrivateLayout::Shared => (private, private, private, self.private_bytes as f64 / 2.0),
        };
        let batch_files = match self.batch_bytes {
            0 => 0,
            _ => self.batch_files,
        };
        Shape {
            width: u64::from(self.width),
            scheduler_pipelines: 1,
            depth: u64::from(self.depth),
            pipeline_jobs: f64::from(self.depth),
            batch_bytes: u128::from(self.batch_bytes),
            batch_total_bytes: u128::from(self.depth) * u128::from(self.batch_bytes),
            batch_read_bytes: self.batch_bytes as f64,
            level_volumes: 1,
            running_bytes: running,
            waiting_bytes: waiting,
            retained_bytes: kept,
            largest_volume_bytes: self.private_bytes,
            has_equal_volumes: true,
            volume_files: self.private_files,
            scratch: ScratchSizes::new(),
            scratch_bytes: None,
            batch_files,
            batch_total_files: u64::from(self.depth).saturating_mul(batch_files),
            private_io_bytes: input_bytes,
            endpoint_in_bytes: input_bytes,
            endpoint_out_bytes: input_bytes,
            run_s: self.run_s,
            variability: self.variability,
            cpus: 1.0,
            cpu_widths: Vec::new(),
            critical_path_ratio: 1.0,
        }
    }
}

/// The most files of a cache volume.
fn cache_files_max(workflow: &Workflow) -> u64 {
    let volumes = workflow.volumes.iter();
    let volumes = volumes.filter(|volume| matches!(volume.kind, VolumeKind::Cache { .. }));
    volumes.map(|volume| volume.size_files).max().unwrap_or(1)
}

fn parse_number(text: &str, most: u32) -> Result<u32, String> {
    let number = text
        .parse()
        .ok()
        .filter(|number| (1..=most).contains(number));
    number.ok_or_else(|| format!("must be a whole number from 1 to {most}"))
}

fn parse_fraction(text: &str) -> Result<f64, String> {
    let share = text
        .parse()
        .ok()
        .filter(|share: &f64| (0.0..=10.0).contains(share));
    share.ok_or_else(|| "must be a fraction of the run time, from 0 to 10, such as 0.1".into())
}

/// Checks that all jobs have the properties for which the model has one number; returns their run
/// time.
fn check_equal_jobs(workflow: &Workflow) -> Result<f64, NotCanonicalError> {
    let first = &workflow.jobs[0];
    for job in &workflow.jobs {
        let Some(runtime_s) = job.runtime_s else {
            return Err(NotCanonicalError(format!(
                "job '{}' declares no runtime",
                job.name
            )));
        };
        if Some(runtime_s) != first.runtime_s {
            let (a, b) = (&first.name, &job.name);
            return Err(NotCanonicalError(format!(
                "jobs '{a}' and '{b}' have different run times"
            )));
        }
        if job.cpus != 1 {
            return Err(NotCanonicalError(format!(
                "job '{}' requests {} processors",
                job.name, job.cpus
            )));
        }
    }
    Ok(first.runtime_s.unwrap_or(0) as f64)
}

fn check_chain(
    workflow: &Workflow,
    members: &[JobIndex],
    depth: usize,
) -> Result<(), NotCanonicalError> {
    for (position, &member) in members.iter().enumerate() {
        let job = workflow.job(member);
        let before: &[JobIndex] = if position == 0 {
            &[]
        } else {
            &members[position - 1..position]
        };
        if job.parents != before {
            let why = format!("job '{}' is not the next job of a chain", job.name);
            return Err(NotCanonicalError(why));
        }
    }
    if members.len() != depth {
        let name = &workflow.job(members[0]).name;
        let why = format!(
            "the pipeline of job '{name}' has {} jobs, the first has {depth}",
            members.len()
        );
        return Err(NotCanonicalError(why));
    }
    Ok(())
}

/// Bytes and files of a pipeline's private volumes, and whether it is one volume for all its jobs.
fn measure_private_volumes(
    workflow: &Workflow,
    members: &[JobIndex],
) -> Result<((u64, u64), bool), NotCanonicalError> {
    let mut volumes = BTreeSet::new();
    for &member in members {
        volumes.extend(scratch_volumes_of(workflow, member));
    }
    let name = &workflow.job(members[0]).name;
    let sizes: BTreeSet<(u64, u64)> = volumes
        .iter()
        .map(|&v| workflow.volume(v))
        .map(|volume| (volume.size_bytes, volume.size_files))
        .collect();
    let Some(&size) = sizes.first() else {
        let why = format!("the pipeline of job '{name}' has no scratch volumes");
        return Err(NotCanonicalError(why));
    };
    if sizes.len() > 1 {
        let why =
            format!("the scratch volumes in the pipeline of job '{name}' differ in bytes or files");
        return Err(NotCanonicalError(why));
    }
    let users = |&v: &VolumeIndex| workflow.volume(v).users.len();
    if volumes.len() == 1 && volumes.iter().map(users).sum::<usize>() == members.len() {
        return Ok((size, true));
    }
    let chained = volumes.len() == members.len() + 1
        && volumes.iter().map(users).all(|users| users <= 2)
        && members
            .iter()
            .all(|&member| scratch_volumes_of(workflow, member).len() == 2)
        && members.windows(2).all(|pair| {
            let next = scratch_volumes_of(workflow, pair[1]);
            scratch_volumes_of(workflow, pair[0])
                .intersection(&next)
                .count()
                == 1
        });
    if chained {
        return Ok((size, false));
    }
    let why = format!(
        "the scratch volumes in the pipeline of job '{name}' are neither one for all jobs nor one \
         for each two consecutive jobs"
    );
    Err(NotCanonicalError(why))
}

fn scratch_volumes_of(workflow: &Workflow, job: JobIndex) -> BTreeSet<VolumeIndex> {
    let mounts = workflow.job(job).mounts.iter().map(|mount| mount.volume);
    mounts
        .filter(|&v| matches!(workflow.volume(v).kind, VolumeKind::Scratch { .. }))
        .collect()
}

fn cache_volumes_of(workflow: &Workflow, job: JobIndex) -> BTreeSet<VolumeIndex> {
    let mounts = workflow.job(job).mounts.iter().map(|mount| mount.volume);
    mounts
        .filter(|&v| matches!(workflow.volume(v).kind, VolumeKind::Cache { .. }))
        .collect()
}

/// The size of each depth's batch volume; 0 when no depth has one.
fn measure_batch_volumes(
    workflow: &Workflow,
    pipelines: &ConnectedPipelines,
    first: &[JobIndex],
) -> Result<u64, NotCanonicalError> {
    let (mut sizes, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for (depth, &job) in first.iter().enumerate() {
        let caches = cache_volumes_of(workflow, job);
        let stage = depth + 1;
        if caches.len() > 1 {
            return Err(NotCanonicalError(format!(
                "jobs of level {stage} read several cache volumes"
            )));
        }
        if pipelines
            .members
            .iter()
            .any(|members| cache_volumes_of(workflow, members[depth]) != caches)
        {
            return Err(NotCanonicalError(format!(
                "jobs of level {stage} read different cache volumes"
            )));
        }
        sizes.insert(caches.first().map_or(0, |&v| workflow.volume(v).size_bytes));
        if caches.into_iter().any(|volume| !seen.insert(volume)) {
            return Err(NotCanonicalError(format!(
                "level {stage} reads a cache volume of an earlier level"
            )));
        }
    }
    match (sizes.first(), sizes.len()) {
        (Some(&size), 1) => Ok(size),
        _ => Err(NotCanonicalError(
            "the levels have batch volumes of different sizes".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    fn workflow_from_text(text: &str) -> Workflow {
        let none = |_: &str| Err("no files".to_owned());
        parse_workflow("w.bafs", text, &none).unwrap().workflow
    }

    const CHAIN: &str = "
        volume b1 cache bafs://home/b1 45 GB
        volume b2 cache bafs://home/b2 45 GB
        for i in 1..3
          volume in$(i) scratch 1 GB exact from bafs://home/in$(i)
          volume mid$(i) scratch 1 GB exact
          volume out$(i) scratch 1 GB exact
          job a$(i) {
            executable = a
            runtime = 60 s
          }
          job z$(i) {
            executable = z
            runtime = 60 s
          }
          parent a$(i) child z$(i)
          mount b1 a$(i) /b
          mount b2 z$(i) /b
          mount in$(i) a$(i) /in ro
          mount mid$(i) a$(i) /out
          mount mid$(i) z$(i) /in ro
          mount out$(i) z$(i) /out
        end";

    #[test]
    fn parser_rejects_bad_values_with_their_key() {
        let text = "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1";
        let canonical = CanonicalWorkload::parse(text).unwrap();
        assert_eq!((canonical.width, canonical.depth), (350, 5));
        assert_eq!(
            (canonical.batch_bytes, canonical.private_bytes),
            (45_000_000_000, 500_000_000)
        );
        assert_eq!((canonical.run_s, canonical.variability), (5000.0, 0.1));
        assert_eq!(CanonicalWorkload::parse(&format!("{text},")), Ok(canonical));
        for (wrong, right, expected) in [
            ("width=350", "width=0", "width=0: must be"),
            ("width=350,", "", "width=... is missing"),
            ("width=350,", "width=350,,", "'' is not of the form"),
            ("depth=5", "deep=5", "deep=5: unknown key"),
            ("45GB", "45", "batch=45: the size '45' has no unit"),
            ("45GB", "-45GB", "batch=-45GB"),
            ("var=0.1", "var=-1", "var=-1: must be"),
            ("var=0.1", "var=NaN", "var=NaN: must be"),
            ("var=0.1", "var", "'var' is not of the form"),
            ("var=0.1", "run=1s", "is given twice"),
            ("5000s", "soon", "run=soon"),
        ] {
            let error = CanonicalWorkload::parse(&text.replace(wrong, right))
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{right}: {error}");
        }
    }

    #[test]
    fn a_chain_of_private_volumes_is_recognised() {
        let canonical = CanonicalWorkload::recognise(&workflow_from_text(CHAIN), 0.1).unwrap();
        let expected = "width=3,depth=2,batch=45GB,private=1GB,run=60s,var=0.1";
        let expected = CanonicalWorkload {
            batch_files: canonical.batch_files,
            private_files: canonical.private_files,
            ..CanonicalWorkload::parse(expected).unwrap()
        };
        assert_eq!(canonical, expected);
        let shape = canonical.shape();
        assert_eq!(
            (shape.running_bytes, shape.waiting_bytes),
            (2_000_000_000, 1_000_000_000)
        );
        assert_eq!(shape.retained_bytes, 3_000_000_000);
    }

    #[test]
    fn pipeline_holds_its_shared_volume_throughout() {
        let text = CHAIN
            .replace(
                "volume in$(i) scratch 1 GB exact from bafs://home/in$(i)",
                "",
            )
            .replace("volume out$(i) scratch 1 GB exact", "")
            .replace("mount in$(i) a$(i) /in ro", "")
            .replace("mount out$(i) z$(i) /out", "");
        let canonical = CanonicalWorkload::recognise(&workflow_from_text(&text), 0.0).unwrap();
        assert_eq!(canonical.layout, PrivateLayout::Shared);
        let shape = canonical.shape();
        let bytes = (
            shape.running_bytes,
            shape.waiting_bytes,
            shape.retained_bytes,
        );
        assert_eq!(bytes, (1_000_000_000, 1_000_000_000, 1_000_000_000));
    }

    #[test]
    fn shared_volume_beside_private_ones_is_not_canonical() {
        let text = "
            volume all scratch 1 GB exact
            for i in 1..3
              volume own$(i) scratch 1 GB exact
              job j$(i) {
                executable = x
                runtime = 1 s
              }
              mount all j$(i) /all
              mount own$(i) j$(i) /own
            end
            parent j1 child j2
            parent j2 child j3";
        let error = CanonicalWorkload::recognise(&workflow_from_text(text), 0.0).unwrap_err();
        assert!(error.to_string().contains("neither one for all"), "{error}");
        let reversed = "
            volume all scratch 1 GB exact
            job z {
              executable = x
              runtime = 1 s
            }
            job a {
              executable = x
              runtime = 1 s
            }
            parent a child z
            mount all z /all
            mount all a /all";
        let canonical = CanonicalWorkload::recognise(&workflow_from_text(reversed), 0.0).unwrap();
        assert_eq!(
            (canonical.layout, canonical.depth),
            (PrivateLayout::Shared, 2)
        );
    }

    #[test]
    fn pipeline_without_scratch_volumes_is_not_canonical() {
        let text = "job a {\nexecutable = x\nruntime = 1 s\n}";
        let error = CanonicalWorkload::recognise(&workflow_from_text(text), 0.0).unwrap_err();
        let error = error.to_string();
        assert!(error.ends_with("'a' has no scratch volumes"), "{error}");
    }

    #[test]
    fn non_canonical_workflows_are_rejected_with_reasons() {
        for (wrong, right, expected) in [
            (
                "b2 cache bafs://home/b2 45",
                "b2 cache bafs://home/b2 46",
                "batch volumes of different",
            ),
            (
                "mount b2 z$(i)",
                "mount b1 z$(i)",
                "level 2 reads a cache volume of an earlier",
            ),
            (
                "mid$(i) scratch 1 GB exact",
                "mid$(i) scratch 2 GB exact",
                "differ in bytes",
            ),
            (
                "mid$(i) scratch 1 GB exact",
                "mid$(i) scratch 1 GB exact files 7",
                "differ in bytes or files",
            ),
            (
                "executable = z\n            runtime = 60 s",
                "executable = z",
                "declares no runtime",
            ),
            (
                "executable = z",
                "executable = z\n request_cpus = 2",
                "requests 2 processors",
            ),
            (
                "runtime = 60 s\n          }\n          parent",
                "runtime = 61 s\n          }\n          parent",
                "different run times",
            ),
            (
                "volume in$(i)",
                "parent a1 child z$(i)\nvolume in$(i)",
                "is not the next job",
            ),
            (
                "end",
                "end\njob more {\nexecutable = x\nruntime = 60 s\n}\nvolume m scratch 1 GB exact\n\
                 mount m more /m",
                "has 1 jobs, the first has 2",
            ),
            (
                "mount out$(i) z$(i) /out",
                "mount out$(i) z$(i) /out\nmount in$(i) z$(i) /first ro",
                "neither one for all",
            ),
        ] {
            assert!(CHAIN.contains(wrong), "{wrong}");
            let found = CanonicalWorkload::recognise(
                &workflow_from_text(&CHAIN.replacen(wrong, right, 1)),
                0.0,
            );
            let error = found.unwrap_err().to_string();
            assert!(error.contains(expected), "{right}: {error}");
        }
    }
}
