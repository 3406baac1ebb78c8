//! How far a workload is from a canonical one (Bent 2005, §4.2.2 and §6.3.1).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::instances::{find_data_edges, group_instances};
use crate::role::Role;
use crate::trace::Trace;
use crate::traffic::sum_traffic;
use crate::variability::Spread;

/// One condition of the definition, and how far a workload is from it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CanonicalCondition {
    /// The condition, in words.
    pub condition: &'static str,
    /// From 0, where it holds, to 1.
    pub distance: f64,
}

/// All conditions.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CanonicalDistance {
    /// The mean of the distances of all conditions, from 0 to 1.
    pub mean: f64,
    /// Each condition.
    pub conditions: Vec<CanonicalCondition>,
}

/// Compares a workload with the definition of a canonical one.
pub fn measure_canonical_distance(
    traces: &[Trace],
    roles: &BTreeMap<String, Role>,
) -> CanonicalDistance {
    if traces.is_empty() {
        return CanonicalDistance::default();
    }
    let (depth, one_batch, batch_sizes) = (
        measure_depths(traces),
        measure_batch_sharing(traces, roles),
        measure_batch_sizes(traces, roles),
    );
    let run_times: Vec<f64> = traces.iter().map(|trace| trace.wall_us as f64).collect();
    let conditions = [
        ("all pipelines have the same depth", depth),
        (
            "each job has at most one parent and one child",
            measure_graph(traces),
        ),
        (
            "all jobs of a depth, and no others, read one batch volume",
            one_batch,
        ),
        (
            "each job reads one private volume",
            measure_private_reads(traces, roles),
        ),
        (
            "each job writes one private volume",
            measure_private_writes(traces, roles),
        ),
        (
            "each job reads the whole of its volumes",
            measure_partial_reads(traces, roles),
        ),
        ("all batch volumes have one size", batch_sizes),
        (
            "all private volumes have one size",
            measure_private_sizes(traces, roles),
        ),
        (
            "all jobs run equally long",
            Spread::of(&run_times).variation.min(1.0),
        ),
    ];
    let conditions = conditions.map(|(condition, distance)| CanonicalCondition {
        condition,
        distance,
    });
    let sum: f64 = conditions.iter().map(|it| it.distance).sum();
    CanonicalDistance {
        mean: sum / conditions.len() as f64,
        conditions: conditions.to_vec(),
    }
}

fn share(count: usize, of: usize) -> f64 {
    match of {
        0 => 0.0,
        _ => count as f64 / of as f64,
    }
}

/// How far the least of these values is from the largest.
fn relative_range(values: &[u64]) -> f64 {
    let (least, most) = (values.iter().min(), values.iter().max());
    match (least, most) {
        (Some(least), Some(most)) if *most > 0 => (most - least) as f64 / *most as f64,
        _ => 0.0,
    }
}

fn measure_depths(traces: &[Trace]) -> f64 {
    let instances = group_instances(traces);
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    for instance in &instances {
        *counts.entry(instance.stages.len()).or_default() += 1;
    }
    let usual = counts.values().max().copied().unwrap_or(0);
    share(instances.len() - usual, instances.len())
}

fn measure_graph(traces: &[Trace]) -> f64 {
    let edges = find_data_edges(traces);
    let is_branching = |job: &usize| {
        let parents = edges.iter().filter(|(_, child)| child == job).count();
        let children = edges.iter().filter(|(parent, _)| parent == job).count();
        parents > 1 || children > 1
    };
    share((0..traces.len()).filter(is_branching).count(), traces.len())
}

/// Batch bytes that are read at several depths, or not by all of a depth.
fn measure_batch_sharing(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let instances = group_instances(traces);
    let mut readers: BTreeMap<&str, (u64, BTreeMap<usize, BTreeSet<&str>>)> = BTreeMap::new();
    let mut jobs_at: BTreeMap<usize, usize> = BTreeMap::new();
    for instance in &instances {
        for (depth, trace) in instance.stages.iter().enumerate() {
            *jobs_at.entry(depth).or_default() += 1;
            for access in trace.accesses.iter().filter(|it| it.kind.is_read()) {
                let file = &trace.files[access.file as usize];
                if roles.get(&file.path) == Some(&Role::Batch) {
                    let (size, depths) = readers.entry(&file.path).or_default();
                    *size = (*size).max(file.size_bytes_max);
                    depths.entry(depth).or_default().insert(instance.name);
                }
            }
        }
    }
    let all: u64 = readers.values().map(|(size, _)| size).sum();
    let odd = readers.values().filter(|(_, depths)| {
        let is_partial = |(depth, names): (&usize, &BTreeSet<&str>)| names.len() != jobs_at[depth];
        depths.len() > 1 || depths.iter().any(is_partial)
    });
    let odd: u64 = odd.map(|(size, _)| size).sum();
    if all == 0 {
        0.0
    } else {
        odd as f64 / all as f64
    }
}

/// Jobs whose private inputs do not come from one place: one earlier job, or the home.
fn measure_private_reads(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let edges = find_data_edges(traces);
    let reads_home = |trace: &Trace| {
        let mut reads = trace
            .accesses
            .iter()
            .filter(|it| it.kind.is_read() && it.bytes > 0);
        reads.any(|access| {
            let file = &trace.files[access.file as usize];
            roles.get(&file.path) == Some(&Role::Endpoint) && !file.is_created
        })
    };
    let is_odd = |(position, trace): &(usize, &Trace)| {
        let parents = edges.iter().filter(|(_, child)| child == position).count();
        parents + usize::from(parents == 0 && reads_home(trace)) != 1
    };
    share(
        traces.iter().enumerate().filter(is_odd).count(),
        traces.len(),
    )
}

/// Jobs that do not write either results or pipeline data.
fn measure_private_writes(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let is_odd = |trace: &&Trace| {
        let writes = trace.accesses.iter().filter(|it| it.kind.is_write());
        let role = |access: &crate::trace::Access| {
            roles.get(&trace.files[access.file as usize].path).copied()
        };
        let kinds: BTreeSet<Option<Role>> = writes.map(role).collect();
        kinds.len() != 1
    };
    share(traces.iter().filter(is_odd).count(), traces.len())
}

fn measure_partial_reads(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let reads = traces
        .iter()
        .map(|trace| sum_traffic(&[trace], roles, None).reads);
    let (unique, whole) = reads.fold((0, 0), |(unique, whole), reads| {
        (unique + reads.unique_bytes, whole + reads.static_bytes)
    });
    match whole {
        0 => 0.0,
        _ => (1.0 - unique as f64 / whole as f64).max(0.0),
    }
}

fn measure_batch_sizes(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let instances = group_instances(traces);
    let depth_max = instances
        .iter()
        .map(|it| it.stages.len())
        .max()
        .unwrap_or(0);
    let size_at = |depth: usize| {
        let stages = instances
            .iter()
            .filter_map(|it| it.stages.get(depth).copied());
        let stages: Vec<&Trace> = stages.collect();
        sum_traffic(&stages, roles, None)
            .role(Role::Batch)
            .static_bytes
    };
    relative_range(&(0..depth_max).map(size_at).collect::<Vec<_>>())
}

fn measure_private_sizes(traces: &[Trace], roles: &BTreeMap<String, Role>) -> f64 {
    let mut sizes = Vec::new();
    for trace in traces {
        let (mut read, mut written) = (0, 0);
        let mut reads = vec![false; trace.files.len()];
        let mut writes = vec![false; trace.files.len()];
        for access in &trace.accesses {
            reads[access.file as usize] |= access.kind.is_read();
            writes[access.file as usize] |= access.kind.is_write();
        }
        for (number, file) in trace.files.iter().enumerate() {
            if roles.get(&file.path) != Some(&Role::Batch) {
                let size = file.size_bytes_max;
                read += if reads[number] && !file.is_created {
                    size
                } else {
                    0
                };
                written += if writes[number] { size } else { 0 };
            }
        }
        sizes.extend([read, written]);
    }
    relative_range(&sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::role::find_roles;
    use crate::trace::AccessKind;
    use crate::trace_builder::{DataOperation, TraceBuilder};

    /// A job that reads and writes whole files of a size.
    pub(crate) fn job(instance: &str, reads: &[&str], writes: &[&str], bytes: u64) -> Trace {
        let mut builder = TraceBuilder::default();
        let reads = reads.iter().map(|path| (path, AccessKind::Read));
        let writes = writes.iter().map(|path| (path, AccessKind::Write));
        for (handle, (path, kind)) in reads.chain(writes).enumerate() {
            let handle = handle as u64;
            builder.record_open(0, "p", (path, bytes), handle, kind.is_write());
            let operation = DataOperation {
                handle,
                kind,
                offset: 0,
                bytes,
            };
            builder.record_data(0, operation);
            builder.forget_handle(handle);
        }
        Trace {
            instance: instance.to_owned(),
            wall_us: 1000,
            ..builder.finish()
        }
    }

    #[test]
    fn canonical_workloads_have_distance_zero() {
        let mut traces = Vec::new();
        for name in ["a", "b", "c"] {
            traces.push(job(
                name,
                &["batch1", &format!("{name}.in")],
                &[&format!("{name}.1")],
                9,
            ));
            traces.push(job(
                name,
                &["batch2", &format!("{name}.1")],
                &[&format!("{name}.2")],
                9,
            ));
        }
        let distance = measure_canonical_distance(&traces, &find_roles(&traces));
        assert_eq!(distance.mean, 0.0, "{distance:?}");
    }

    #[test]
    fn joins_and_unequal_sizes_are_distances() {
        let mut traces = vec![
            job("a", &["db", "a.in"], &["a.out"], 10),
            job("b", &["db", "b.in"], &["b.out"], 10),
            job("join", &["a.out", "b.out"], &["all"], 40),
        ];
        traces[2].files[0].size_bytes_max = 10;
        traces[2].files[1].size_bytes_max = 10;
        let distance = measure_canonical_distance(&traces, &find_roles(&traces));
        let of = |text: &str| {
            let found = distance
                .conditions
                .iter()
                .find(|it| it.condition.contains(text));
            found.map(|it| (it.distance * 100.0).round())
        };
        assert_eq!(of("one parent"), Some(33.0));
        assert_eq!(of("reads one private"), Some(33.0));
        assert_eq!(of("same depth"), Some(0.0));
        assert_eq!(of("private volumes have one size"), Some(75.0));
    }
}
