//! A scan while other nodes are killed and come back, or leave the cache and join it anew, every
//! few seconds: what it costs, and whether every byte is right. The nodes that readers use stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};

use super::{MIB, Outcome, Work, row};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, digits, seconds};
use crate::bench::{Options, Report};
use crate::content::Content;
use crate::stage::{CacheCluster, compare, scan};

const NODES: usize = 8;

/// The first nodes have readers and stay; the others come and go.
const STAYING: usize = 4;

const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

/// A node is away for so long, and all are there for as long before the next one goes.
const AWAY: Duration = Duration::from_millis(1_500);

/// What one scan took.
struct Run {
    seconds: f64,
    home_bytes: u64,
    wrong_bytes: u64,
    kills: usize,
    fallbacks: u64,
}

/// A calm scan and one with churn, in turns.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<Outcome> {
    let set = MIB * options.pick(128, 48);
    let content = Arc::new(Content::new(7, set));
    let mut stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("churn", &content)?;
    report.section(&format!(
        "a scan of {} MiB behind {LINK} on {STAYING} of {NODES} nodes; of the others one is killed \
         (SIGKILL) or leaves the cache, so that its share moves, every {} s and is back after {} s",
        set / MIB,
        2.0 * AWAY.as_secs_f64(),
        AWAY.as_secs_f64()
    ));
    let mut rows = vec![row([
        "",
        "seconds",
        "time / link",
        "home / set",
        "kills, leaves",
        "fallbacks",
    ])];
    let (mut calm_s, mut churn_s, mut ratios, mut wrong) = (vec![], vec![], vec![], 0);
    for round in 0..options.pick(2, 1) {
        for kills in [false, true] {
            let run = once(
                &mut stage,
                &content,
                &format!("churn-{round}-{kills}"),
                kills,
            )?;
            let ratio = run.home_bytes as f64 / set as f64;
            wrong += run.wrong_bytes;
            rows.push(row([
                if kills { "churn" } else { "calm" },
                &digits(run.seconds),
                &digits(run.seconds * LINK_BYTES_PER_S / set as f64),
                &digits(ratio),
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
    report.table(&rows);
    report.measured("churn_home_read_ratio", &Samples::new(ratios));
    let time = Samples::new(churn_s).ratio_to(&Samples::new(calm_s));
    report.measured("churn_time_vs_calm", &time);
    Ok(Outcome { wrong_bytes: wrong })
}

fn once(stage: &mut CacheCluster, content: &Arc<Content>, name: &str, kills: bool) -> Result<Run> {
    let wish = CacheSpec {
        cooperative: name.to_owned(),
        ..CacheSpec::new("churn", content.bytes().len() as u64 + MIB as u64)
    };
    let mut volumes = stage.caches(&stage.nodes(), &wish)?;
    let script = stage.compare_script("churn");
    let mut work: Vec<Work> = Vec::new();
    for volume in &volumes[..STAYING] {
        let speaker = stage.client.client().clone();
        let (node, target, script) = (volume.node.clone(), volume.mount_target(), script.clone());
        work.push(Box::pin(compare(speaker, node, target, script)));
        let (speaker, volume, content) = (stage.reader()?, volume.clone(), content.clone());
        work.push(Box::pin(
            async move { scan(speaker, volume, &content).await },
        ));
    }
    let staying = stage.nodes()[..STAYING].to_vec();
    let before = (stage.home_bytes()?, stage.sum(&staying, "cache_fallbacks")?);
    let home = stage.test_cluster.cluster.home_address().to_owned();
    let (leaving, wish, home) = (&mut volumes[STAYING..], &wish, &home);
    let CacheCluster { test_cluster: world, client: api, .. } = &mut *stage;
    let api = &*api;
    let over = AtomicBool::new(false);
    let (time, wrong, killed) = std::thread::scope(|scope| -> Result<_> {
        let disturb = scope.spawn(|| -> Result<usize> {
            let mut killed = 0;
            while kills && !over.load(Ordering::Relaxed) {
                let place = killed % (NODES - STAYING);
                if (killed / (NODES - STAYING)).is_multiple_of(2) == killed.is_multiple_of(2) {
                    let name = format!("n{}", STAYING + 1 + place);
                    world.cluster.kill(&name)?;
                    std::thread::sleep(AWAY);
                    world.cluster.restart(&name)?;
                } else {
                    // Who was killed is believed in for longer than it is away; who has no volume
                    // any more is a peer no more.
                    let volume = &mut leaving[place];
                    api.block_on(api.client().delete_volume(volume))?;
                    std::thread::sleep(AWAY);
                    *volume = api.block_on(api.client().create_cache(&volume.node, home, wish))?;
                }
                killed += 1;
                std::thread::sleep(AWAY);
            }
            Ok(killed)
        });
        let read = seconds(|| api.run_all(work));
        over.store(true, Ordering::Relaxed);
        let killed = disturb.join().ok().context("who disturbs broke off")??;
        let (time, wrong) = read?;
        Ok((time, wrong, killed))
    })?;
    let home_bytes = stage.home_bytes()? - before.0;
    let fallbacks = stage.sum(&staying, "cache_fallbacks")? - before.1;
    stage.delete(&volumes)?;
    Ok(Run {
        seconds: time,
        home_bytes,
        wrong_bytes: wrong.iter().sum(),
        kills: killed,
        fallbacks,
    })
}
