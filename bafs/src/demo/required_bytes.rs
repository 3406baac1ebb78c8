//! How many distinct bytes of home files the jobs of a run needed. Counts only.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use bafs_sched::report::RunReport;
use bafs_workflow::{VolumeKind, Workflow};

use super::reference_run::export_path;

const PAGE_BYTES: u64 = 4096;

/// Size of a file, and the runs of pages of it that jobs read.
type PagesRead = (u64, Vec<(u64, u64)>);

/// Distinct 4 KiB pages of batch files that any job read, in bytes, and the whole of each file
/// that fills a scratch volume (it is delivered whole).
pub(super) fn unique_bytes(report: &RunReport, workflow: &Workflow, home: &Path) -> Result<u64> {
    let mut total = 0;
    let mut runs: BTreeMap<(&str, &str), PagesRead> = BTreeMap::new();
    for volume in &workflow.volumes {
        if let VolumeKind::Scratch { fill: Some(source) } = &volume.kind {
            let path = home.join(export_path(source));
            total += fs::metadata(&path)
                .with_context(|| path.display().to_string())?
                .len();
        }
    }
    let is_batch = |name: &str| {
        let named = workflow.volumes.iter().find(|volume| volume.name == name);
        named.is_some_and(|volume| matches!(volume.kind, VolumeKind::Cache { .. }))
    };
    for used in report.jobs.iter().flat_map(|job| &job.volumes) {
        for file in used.pages.iter().filter(|_| is_batch(&used.name)) {
            let entry = runs.entry((&used.name, &file.path)).or_default();
            entry.0 = file.size;
            entry.1.extend(&file.page_runs);
        }
    }
    total += runs
        .into_values()
        .map(|(size, runs)| covered_bytes(size, runs))
        .sum::<u64>();
    Ok(total)
}

/// Bytes of a file of `size` bytes that runs of pages cover, each page counted once.
fn covered_bytes(size: u64, mut runs: Vec<(u64, u64)>) -> u64 {
    runs.sort_unstable();
    let (mut bytes, mut covered_to) = (0, 0);
    for (first, count) in runs {
        let start = (first * PAGE_BYTES).max(covered_to);
        let end = ((first + count) * PAGE_BYTES).min(size);
        if end > start {
            bytes += end - start;
            covered_to = end;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_once_and_the_last_is_short() {
        assert_eq!(covered_bytes(10_000, vec![(0, 1), (0, 2), (1, 1)]), 8192);
        assert_eq!(covered_bytes(10_000, vec![(2, 1)]), 10_000 - 8192);
        assert_eq!(covered_bytes(10_000, vec![(2, 5), (0, 1)]), 4096 + 1808);
        assert_eq!(covered_bytes(0, vec![]), 0);
    }
}
