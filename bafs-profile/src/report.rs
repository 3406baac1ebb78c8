//! All figures of a profile as one value.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cache_curve::{CachePoint, compute_cache_curve};
use crate::canonical::{CanonicalDistance, measure_canonical_distance};
use crate::home_scaling::{HomeScaling, compute_home_scaling};
use crate::instances::group_instances;
use crate::role::{Role, find_roles};
use crate::timeline::{BlockLife, TimeSlice, list_block_lives, slice_time};
use crate::trace::Trace;
use crate::traffic::{FileRow, Traffic, list_files, sum_traffic};
use crate::variability::{Spread, StageSpread};

/// Parts into which the time of an instance is divided.
const TIME_SLICES: usize = 60;
/// Lives of blocks: rows of a picture that fits a page.
const BLOCK_LIFE_ROWS: u64 = 80;

/// Resources and traffic of one stage, of one program of it, or of a whole instance.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UseRow {
    /// The stage or program; `total` for the instance.
    pub name: String,
    /// Whether it is a program of the stage above it, whose times are not known apart.
    pub is_program: bool,
    /// Real time, in seconds.
    pub wall_s: f64,
    /// Processor time, in seconds.
    pub cpu_s: f64,
    /// Resident memory at most, in bytes.
    pub memory_bytes_max: u64,
    /// File use.
    pub traffic: Traffic,
    /// The most different bytes, in blocks of 4 KiB, that a sixtieth of its time used.
    pub working_set_bytes: u64,
}

/// The profile of a workload.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Names of the instances.
    pub instances: Vec<String>,
    /// The first instance: its stages, their programs, and the total.
    pub rows: Vec<UseRow>,
    /// Each file of all instances.
    pub files: Vec<FileRow>,
    /// Hit rates of caches for batch data, over all instances.
    pub batch_cache: Vec<CachePoint>,
    /// The same for pipeline data.
    pub pipeline_cache: Vec<CachePoint>,
    /// The first instance over time.
    pub timeline: Vec<TimeSlice>,
    /// Lives of blocks of the first instance.
    pub block_lives: Vec<BlockLife>,
    /// Pipelines that a home can serve, by the first instance.
    pub home_scaling: Vec<HomeScaling>,
    /// How instances differ.
    pub variability: Vec<StageSpread>,
    /// How far the workload is from canonical.
    pub canonical: CanonicalDistance,
    /// What the reader should know of the traces.
    pub notes: Vec<String>,
}

/// Analyses traces, in the order in which they were made.
pub fn analyse(traces: &[Trace]) -> Report {
    let roles = find_roles(traces);
    let instances = group_instances(traces);
    let first: Vec<&Trace> = instances
        .first()
        .map(|it| it.stages.clone())
        .unwrap_or_default();
    let rows = list_rows(&first, &roles);
    let total = rows.last().cloned();
    let scaling = total.map(|row| compute_home_scaling(&row.traffic, row.cpu_s));
    Report {
        instances: instances.iter().map(|it| it.name.to_owned()).collect(),
        rows,
        files: list_files(traces, &roles),
        batch_cache: compute_cache_curve(traces, &roles, Role::Batch),
        pipeline_cache: compute_cache_curve(traces, &roles, Role::Pipeline),
        timeline: slice_time(&first, &roles, TIME_SLICES),
        block_lives: list_block_lives(&first, &roles, BLOCK_LIFE_ROWS),
        home_scaling: scaling.unwrap_or_default(),
        variability: list_spreads(traces),
        canonical: measure_canonical_distance(traces, &roles),
        notes: list_notes(traces, instances.len()),
    }
}

fn working_set(stages: &[&Trace], roles: &BTreeMap<String, Role>) -> u64 {
    let slices = slice_time(stages, roles, TIME_SLICES);
    slices
        .iter()
        .map(|slice| slice.working_set_bytes)
        .max()
        .unwrap_or(0)
}

fn list_rows(stages: &[&Trace], roles: &BTreeMap<String, Role>) -> Vec<UseRow> {
    let row = |name: &str, stages: &[&Trace]| {
        let sum = |of: fn(&Trace) -> u64| stages.iter().map(|trace| of(trace)).sum::<u64>();
        UseRow {
            name: name.to_owned(),
            is_program: false,
            wall_s: sum(|trace| trace.wall_us) as f64 / 1e6,
            cpu_s: sum(|trace| trace.cpu_us) as f64 / 1e6,
            memory_bytes_max: stages
                .iter()
                .map(|it| it.memory_bytes_max)
                .max()
                .unwrap_or(0),
            traffic: sum_traffic(stages, roles, None),
            working_set_bytes: working_set(stages, roles),
        }
    };
    let mut rows = Vec::new();
    for stage in stages {
        rows.push(row(&stage.stage, &[stage]));
        if stage.programs.len() < 2 {
            continue;
        }
        for program in &stage.programs {
            rows.push(UseRow {
                name: program.clone(),
                is_program: true,
                wall_s: 0.0,
                cpu_s: 0.0,
                memory_bytes_max: 0,
                traffic: sum_traffic(&[stage], roles, Some(program)),
                working_set_bytes: 0,
            });
        }
    }
    rows.push(row("total", stages));
    rows
}

fn list_spreads(traces: &[Trace]) -> Vec<StageSpread> {
    let instances = group_instances(traces);
    let depth_max = instances
        .iter()
        .map(|it| it.stages.len())
        .max()
        .unwrap_or(0);
    let roles = BTreeMap::new();
    let spread_at = |depth: usize| {
        let stages = instances
            .iter()
            .filter_map(|it| it.stages.get(depth).copied());
        let stages: Vec<&Trace> = stages.collect();
        let traffic = stages
            .iter()
            .map(|trace| sum_traffic(&[trace], &roles, None).total);
        let traffic: Vec<_> = traffic.collect();
        let of_traces = |of: fn(&Trace) -> f64| {
            Spread::of(&stages.iter().map(|trace| of(trace)).collect::<Vec<_>>())
        };
        let of_traffic = |of: fn(&crate::traffic::Volume) -> u64| {
            Spread::of(&traffic.iter().map(|it| of(it) as f64).collect::<Vec<_>>())
        };
        StageSpread {
            stage: stages
                .first()
                .map(|it| it.stage.clone())
                .unwrap_or_default(),
            instances: stages.len() as u64,
            wall_s: of_traces(|trace| trace.wall_us as f64 / 1e6),
            cpu_s: of_traces(|trace| trace.cpu_us as f64 / 1e6),
            traffic_bytes: of_traffic(|it| it.traffic_bytes),
            unique_bytes: of_traffic(|it| it.unique_bytes),
            memory_bytes: of_traces(|trace| trace.memory_bytes_max as f64),
            files: of_traffic(|it| it.files),
        }
    };
    (0..depth_max).map(spread_at).collect()
}

fn list_notes(traces: &[Trace], instances: usize) -> Vec<String> {
    let mut notes = Vec::new();
    if instances < 2 {
        let note = "one instance was traced: shared inputs count as endpoint data; trace a second \
                    instance with other inputs";
        notes.push(note.to_owned());
    }
    for trace in traces.iter().filter(|trace| trace.exit_code != 0) {
        notes.push(format!(
            "stage {} of instance {} ended with code {}",
            trace.stage, trace.instance, trace.exit_code
        ));
    }
    notes
}
