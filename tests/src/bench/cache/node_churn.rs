//! A scan while other nodes are killed and restarted, or leave the cache and rejoin it, every few
//! seconds: its cost, and whether every byte is right. The nodes that readers use stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::part_outcome::{MIB, PartOutcome, ReadTask};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, format_number, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, count_wrong_bytes, run_compare_job};
use crate::content::Content;

const NODES: usize = 8;

/// The first nodes have readers and stay; the others come and go.
const PERMANENT_NODES: usize = 4;

const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

/// Time of a node's absence, and time with all nodes before the next absence.
const DOWNTIME: Duration = Duration::from_millis(1_500);

/// The figures of one scan.
struct ScanRun {
    seconds: f64,
    home_bytes: u64,
    wrong_bytes: u64,
    kills: usize,
    fallbacks: u64,
}

/// A calm scan and one with churn, in turns.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    let set = MIB * options.choose(128, 48);
    let content = Arc::new(Content::new(7, set));
    let mut stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("churn", &content)?;
    report.print_section(&format!(
        "a scan of {} MiB behind {LINK} on {PERMANENT_NODES} of {NODES} nodes; of the others one \
         is killed (SIGKILL) or leaves the cache, so that its share moves, every {} s and is back \
         after {} s",
        set / MIB,
        2.0 * DOWNTIME.as_secs_f64(),
        DOWNTIME.as_secs_f64()
    ));
    let mut rows = vec![table_row([
        "",
        "seconds",
        "time / link",
        "home / set",
        "kills, leaves",
        "fallbacks",
    ])];
    let (mut calm_s, mut churn_s, mut ratios, mut wrong) = (vec![], vec![], vec![], 0);
    for round in 0..options.choose(2, 1) {
        for kills in [false, true] {
            let run = scan_once(
                &mut stage,
                &content,
                &format!("churn-{round}-{kills}"),
                kills,
            )?;
            let ratio = run.home_bytes as f64 / set as f64;
            wrong += run.wrong_bytes;
            rows.push(table_row([
                if kills { "churn" } else { "calm" },
                &format_number(run.seconds),
                &format_number(run.seconds * LINK_BYTES_PER_S / set as f64),
                &format_number(ratio),
                &run.kills.to_string(),
                &run.fallbacks.to_string(),
            ]));
            if kills {
                churn_s.push(run.seconds);
                ratios.push(ratio);
            } else {
                calm_s.push(run.seconds);
            }
        }
    }
    report.print_table(&rows);
    report.add_samples("churn_home_read_ratio", &Samples::new(ratios));
    let time = Samples::new(churn_s).ratio_to(&Samples::new(calm_s));
    report.add_samples("churn_time_vs_calm", &time);
    Ok(PartOutcome { wrong_bytes: wrong })
}

fn scan_once(
    stage: &mut CacheCluster,
    content: &Arc<Content>,
    name: &str,
    kills: bool,
) -> Result<ScanRun> {
    let spec = CacheSpec {
        cooperative: name.to_owned(),
        ..CacheSpec::new("churn", content.bytes().len() as u64 + MIB as u64)
    };
    let mut volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
    let script = stage.compare_script("churn");
    let mut work: Vec<ReadTask> = Vec::new();
    for volume in &volumes[..PERMANENT_NODES] {
        let api_client = stage.client.client().clone();
        let (node, target, script) = (volume.node.clone(), volume.mount_target(), script.clone());
        work.push(Box::pin(run_compare_job(api_client, node, target, script)));
        let (api_client, volume, content) = (stage.new_reader()?, volume.clone(), content.clone());
        work.push(Box::pin(async move {
            count_wrong_bytes(api_client, volume, &content).await
        }));
    }
    let staying = stage.node_addresses()[..PERMANENT_NODES].to_vec();
    let before = (
        stage.read_home_bytes()?,
        stage.sum_counter(&staying, "cache_fallbacks")?,
    );
    let home = stage.test_cluster.cluster.home_address().to_owned();
    let (leaving, spec, home) = (&mut volumes[PERMANENT_NODES..], &spec, &home);
    let CacheCluster {
        test_cluster: world,
        client: api,
        ..
    } = &mut *stage;
    let api = &*api;
    let over = AtomicBool::new(false);
    let (time, wrong, killed) = std::thread::scope(|scope| -> Result<_> {
        let disturb = scope.spawn(|| -> Result<usize> {
            let mut killed = 0;
            while kills && !over.load(Ordering::Relaxed) {
                let place = killed % (NODES - PERMANENT_NODES);
                if (killed / (NODES - PERMANENT_NODES)).is_multiple_of(2)
                    == killed.is_multiple_of(2)
                {
                    let name = format!("n{}", PERMANENT_NODES + 1 + place);
                    world.cluster.kill(&name)?;
                    std::thread::sleep(DOWNTIME);
                    world.cluster.restart(&name)?;
                } else {
                    // A killed node stays listed for longer than its absence; a node without a
                    // volume is no peer any more.
                    let volume = &mut leaving[place];
                    api.block_on(api.client().delete_volume(volume))?;
                    std::thread::sleep(DOWNTIME);
                    *volume = api.block_on(api.client().create_cache(&volume.node, home, spec))?;
                }
                killed += 1;
                std::thread::sleep(DOWNTIME);
            }
            Ok(killed)
        });
        let read = time_seconds(|| api.run_all(work));
        over.store(true, Ordering::Relaxed);
        let killed = disturb.join().ok().context("who disturbs broke off")??;
        let (time, wrong) = read?;
        Ok((time, wrong, killed))
    })?;
    let home_bytes = stage.read_home_bytes()? - before.0;
    let fallbacks = stage.sum_counter(&staying, "cache_fallbacks")? - before.1;
    stage.delete_volumes(&volumes)?;
    Ok(ScanRun {
        seconds: time,
        home_bytes,
        wrong_bytes: wrong.iter().sum(),
        kills: killed,
        fallbacks,
    })
}
