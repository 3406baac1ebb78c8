//! A chaos run with real processes: kills, stops and restarts nodes, the catalog and the scheduler
//! while a workflow runs, and looks at what came home and what is left.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::bench::measure::Watch;
use crate::dice::Dice;
use crate::{World, processes_with};

const WIDTH: u32 = 40;
const NODES: [&str; 6] = ["40MB"; 6];

/// Faults happen for so long; then what is down comes back.
const FAULTS_S: u64 = 30;

/// A run that takes longer is given up.
const LIMIT_S: u64 = 600;

/// What came of a run.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) is_complete: bool,
    pub(super) is_identical: bool,
    /// Volumes, agents and outputs that should not be there.
    pub(super) leaks: u64,
    pub(super) seconds: f64,
    pub(super) faults: Vec<String>,
}

/// Each job passes on what the one before wrote and adds its own line; a cache is read by all.
fn workflow() -> String {
    let mut text = String::from("volume data cache bafs://home/data 1 MB\n");
    for p in 0..WIDTH {
        for at in 0..4 {
            let before = match at {
                0 => "/data/all".to_owned(),
                _ => "/in/out".to_owned(),
            };
            text += &format!(
                "job j{p}_{at} {{\nexecutable = /bin/sh\narguments = -c \"sleep 0.5; \
                 (cat {before}; cksum < /data/all; echo {p} {at}) > /out/out\"\n}}\n\
                 volume v{p}_{at} scratch 1 MB files 16\nmount data j{p}_{at} /data\n\
                 mount v{p}_{at} j{p}_{at} /out\n"
            );
            if at > 0 {
                let before = at - 1;
                text += &format!("parent j{p}_{before} child j{p}_{at}\n");
                text += &format!("mount v{p}_{before} j{p}_{at} /in ro\n");
            }
        }
        text += &format!("extract v{p}_3 out bafs://home/out/{p}\n");
    }
    text
}

/// What each file must be, made without BAFS.
fn expected(data: &[u8], p: u32) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), data)?;
    let script = "cat $0; for at in 0 1 2 3; do cksum < $0; echo $1 $at; done";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(file.path());
    Ok(command.arg(p.to_string()).output()?.stdout)
}

fn start(world: &World, path: &str) -> Result<Child> {
    let mut command = world.bafs(&["run", path, "--json"]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("bafs run starts")
}

/// One run with the faults of a seed.
pub(super) fn run(seed: u64) -> Result<Ended> {
    let mut world = World::start(&NODES)?;
    world.wait_for_servers(NODES.len() + 1)?;
    let data: Vec<u8> = (0..5_000u32)
        .flat_map(|n| format!("{n}\n").into_bytes())
        .collect();
    world.put("data/all", &data)?;
    let path = world.workflow(&workflow())?.to_string_lossy().into_owned();
    let watch = Watch::start();
    let mut scheduler = start(&world, &path)?;
    let faults = disturb(seed, &mut world, &mut scheduler, &path, &watch)?;
    let is_complete = loop {
        if let Some(status) = scheduler.try_wait()? {
            break status.success();
        }
        if watch.elapsed().as_secs() > LIMIT_S {
            scheduler.kill()?;
            scheduler.wait()?;
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let seconds = watch.elapsed().as_secs_f64();
    let mut is_identical = true;
    for p in 0..WIDTH {
        let found = world.get(&format!("out/{p}")).unwrap_or_default();
        is_identical &= found == expected(&data, p)?;
    }
    let leaks = leaks(&world)?;
    Ok(Ended {
        is_complete,
        is_identical,
        leaks,
        seconds,
        faults,
    })
}

/// Lets things fail for a while. Answers what did, in order.
fn disturb(
    seed: u64,
    world: &mut World,
    scheduler: &mut Child,
    path: &str,
    watch: &Watch,
) -> Result<Vec<String>> {
    let mut dice = Dice::new(seed);
    let mut told = Vec::new();
    while watch.elapsed().as_secs() < FAULTS_S {
        std::thread::sleep(Duration::from_millis(500 + dice.below(2_500)));
        let node = format!("n{}", 1 + dice.below(NODES.len() as u64));
        let pause = Duration::from_millis(200 + dice.below(9_000));
        match dice.below(4) {
            0 => {
                told.push(format!("kill:{node}"));
                world.cluster.kill(&node)?;
                std::thread::sleep(pause);
                world.cluster.restart(&node)?;
            }
            1 => {
                told.push(format!("stop:{node}"));
                world.cluster.signal(&node, Signal::SIGSTOP)?;
                std::thread::sleep(pause);
                world.cluster.signal(&node, Signal::SIGCONT)?;
            }
            2 => {
                told.push("kill:catalog".to_owned());
                world.cluster.kill("catalog")?;
                std::thread::sleep(pause);
                world.cluster.restart("catalog")?;
            }
            _ => {
                if scheduler.try_wait()?.is_some() {
                    break;
                }
                told.push("kill:scheduler".to_owned());
                scheduler.kill()?;
                scheduler.wait()?;
                std::thread::sleep(pause / 4);
                *scheduler = start(world, path)?;
            }
        }
    }
    Ok(told)
}

/// Volumes and agents that are left when servers have had time to notice.
fn leaks(world: &World) -> Result<u64> {
    let identity = world.cluster.identity();
    let agent = format!("agent --identity {}", identity.display());
    let mut left = u64::MAX;
    for _ in 0..60 {
        let volumes = world.json(&["volume", "list"])?;
        let volumes = volumes.as_array().map_or(0, Vec::len);
        left = (volumes + processes_with(&agent).len()) as u64;
        if left == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(left)
}
