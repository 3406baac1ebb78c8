//! How home traffic grows when the data set grows beyond the space of all nodes together: two
//! linear scans, for each replacement policy. Counts bytes; measures no time.

use anyhow::Result;
use bafs_proto::volume::ReplacementPolicy;

use super::part_outcome::{MIB, PartOutcome};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, format_number, table_row};
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, DATA_FILE, count_wrong_bytes};
use crate::content::Content;

const NODES: usize = 4;

/// Sizes of the data set, in percent of the space of all nodes.
const DATA_SET_PERCENT: [usize; 8] = [25, 50, 75, 90, 95, 100, 110, 150];

/// Home is asked for so much more than each byte once, at most, below the knee.
const HOME_FACTOR_MAX: f64 = 1.02;

/// Each through another node, as the jobs of a workflow would.
const SCANS: usize = 2;

/// The home traffic factor for each size and policy.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    let node = MIB * options.choose(128, 32);
    let rounds = options.choose(2, 1);
    let stage = CacheCluster::start(NODES, "4GB", None)?;
    report.print_section(&format!(
        "{SCANS} linear scans of a growing data set, {NODES} nodes of {} MiB: bytes from home / \
         bytes of the set",
        node / MIB
    ));
    let mut rows = vec![table_row(["set / space", "LRU", "MRU", "best possible"])];
    let (mut knee, mut below, mut wrong) = (0, true, 0);
    for percent in DATA_SET_PERCENT {
        let content = Content::new(percent as u64, NODES * node * percent / 100);
        let directory = format!("knee{percent}");
        stage.write_data_set(&directory, &content)?;
        let mut samples = Vec::new();
        for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
            let mut factors = Vec::new();
            for round in 0..rounds {
                let spec = CacheSpec {
                    cooperative: format!("{directory}-{replacement:?}-{round}"),
                    replacement,
                    ..CacheSpec::new(&directory, node as u64)
                };
                let (factor, bad) = measure_home_factor(&stage, &spec, &content)?;
                factors.push(factor);
                wrong += bad;
            }
            samples.push(Samples::new(factors));
        }
        below &= samples[0].median() <= HOME_FACTOR_MAX;
        if below {
            knee = percent;
        }
        // Data beyond the capacity must be fetched again, in each scan but the first.
        let best = 1.0 + (percent as f64 - 100.0).max(0.0) / percent as f64;
        rows.push(table_row([
            &format!("{percent} %"),
            &samples[0].to_string(),
            &samples[1].to_string(),
            &format_number(best),
        ]));
        std::fs::remove_file(
            stage
                .test_cluster
                .home
                .path()
                .join(&directory)
                .join(DATA_FILE),
        )?;
    }
    report.print_table(&rows);
    report.add_figure("knee_percent", knee as f64);
    Ok(PartOutcome { wrong_bytes: wrong })
}

/// Reads the set twice, through another node each time, and sees what home sent.
fn measure_home_factor(
    stage: &CacheCluster,
    spec: &CacheSpec,
    content: &Content,
) -> Result<(f64, u64)> {
    let volumes = stage.create_caches(&stage.node_addresses(), spec)?;
    let before = stage.read_home_bytes()?;
    let mut wrong = 0;
    for volume in &volumes[..SCANS] {
        wrong += stage.client.block_on(count_wrong_bytes(
            stage.new_reader()?,
            volume.clone(),
            content,
        ))?;
    }
    let home_bytes = stage.read_home_bytes()? - before;
    stage.delete_volumes(&volumes)?;
    Ok((home_bytes as f64 / content.bytes().len() as f64, wrong))
}
