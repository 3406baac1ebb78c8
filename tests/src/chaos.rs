//! A chaos run with real processes: nodes are killed, stopped, restarted and lose their disks,
//! their links are cut, their disks are full, home stops, the catalog and the scheduler are killed,
//! several at once, while a workflow runs. Then it looks at what came home and what is left.
//!
//! Links and disks can fail only where the run may have a network and mounts of its own.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::bench::measure::Watch;
use crate::bench::nohang::fault;
use crate::dice::Dice;
use crate::{World, processes_with};

const WIDTH: u32 = 40;
const DEPTH: u32 = 4;
const NODES: [&str; 6] = ["40MB"; 6];

/// Jobs that the nodes run at once.
const SLOTS: u32 = 2 * NODES.len() as u32;
/// A run takes so much longer than things fail: a node that is away at its end, or has just come
/// back, keeps volumes until their lifetime ends.
const CALM: Duration = Duration::from_secs(10);

/// So much of what the scheduler said is told.
const SAID_LINES: usize = 20;

/// A run that takes longer is given up.
const LIMIT_S: u64 = 600;

/// What came of a run.
#[derive(Debug)]
pub struct Ended {
    /// Whether every job is done and every file at home.
    pub is_complete: bool,
    /// Whether all files are those of a run without faults.
    pub is_identical: bool,
    /// Volumes and agents that should not be there.
    pub left: Vec<String>,
    /// The end of what the scheduler said, if the run is not complete.
    pub said: String,
    /// How long it took.
    pub seconds: f64,
    /// What failed, in order.
    pub faults: Vec<String>,
    /// Why links and disks could not fail, if so.
    pub unmade: Option<String>,
}

/// Each job passes on what the one before wrote and adds its own line; a cache is read by all. With
/// all slots in use, and nothing failing, the jobs take `least` together.
fn workflow(least: Duration) -> String {
    let sleep_s = (least * SLOTS).as_secs_f64() / f64::from(WIDTH * DEPTH);
    let mut text = String::from("volume data cache bafs://home/data 1 MB\n");
    for p in 0..WIDTH {
        for at in 0..DEPTH {
            let before = match at {
                0 => "/data/all".to_owned(),
                _ => "/in/out".to_owned(),
            };
            text += &format!(
                "job j{p}_{at} {{\nexecutable = /bin/sh\narguments = -c \"sleep {sleep_s:.2}; \
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
        let last = DEPTH - 1;
        text += &format!("extract v{p}_{last} out bafs://home/out/{p}\n");
    }
    text
}

/// What each file must be, made without BAFS.
fn expected(data: &[u8], p: u32) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), data)?;
    let script = "cat $0; for at in $(seq 0 $2); do cksum < $0; echo $1 $at; done";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(file.path());
    command.args([p.to_string(), (DEPTH - 1).to_string()]);
    Ok(command.output()?.stdout)
}

fn start(world: &World, path: &str) -> Result<Child> {
    let mut command = world.bafs(&["run", path, "--json"]);
    let said = OpenOptions::new()
        .create(true)
        .append(true)
        .open(said(world))?;
    command.stdout(said.try_clone()?).stderr(said);
    command.spawn().context("bafs run starts")
}

/// Where the schedulers of a run say what happens.
fn said(world: &World) -> PathBuf {
    world.cluster.directory().join("said")
}

/// The disk of a node has so much more than it offers.
const DISK: &str = "64m";

/// One run with the faults of a seed, which begin within so long.
///
/// # Errors
/// No cluster, or a process that cannot be killed or started again.
pub fn run(seed: u64, faults: Duration) -> Result<Ended> {
    // A thread that lives apart stays so, and so does all that it starts.
    let run = std::thread::spawn(move || run_apart(seed, faults));
    let ended = run.join();
    ended.unwrap_or_else(|_| Err(anyhow::anyhow!("the run panicked")))
}

fn run_apart(seed: u64, faults: Duration) -> Result<Ended> {
    let unmade = fault::cannot_live_apart();
    if unmade.is_none() {
        fault::live_apart()?;
    }
    let mut world = World::start(&NODES)?;
    if unmade.is_none() {
        make_disks_small(&mut world)?;
    }
    world.wait_for_servers(NODES.len() + 1)?;
    let data: Vec<u8> = (0..5_000u32)
        .flat_map(|n| format!("{n}\n").into_bytes())
        .collect();
    world.put("data/all", &data)?;
    let path = world
        .workflow(&workflow(faults + CALM))?
        .to_string_lossy()
        .into_owned();
    let watch = Watch::start();
    let mut scheduler = start(&world, &path)?;
    let mut chaos = Chaos {
        world: &mut world,
        scheduler: &mut scheduler,
        path: &path,
        is_apart: unmade.is_none(),
        down: Vec::new(),
        told: Vec::new(),
    };
    chaos.disturb(seed, &watch, faults)?;
    let faults = chaos.told;
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
    let mut last = String::new();
    if !is_complete {
        let all = std::fs::read_to_string(said(&world))?;
        let lines: Vec<&str> = all.lines().collect();
        last = lines[lines.len().saturating_sub(SAID_LINES)..].join("\n");
    }
    let left = left(&world)?;
    for at in (1..=NODES.len()).filter(|_| unmade.is_none()) {
        fault::take_small(&store(&world, &format!("n{at}")))?;
    }
    Ok(Ended {
        is_complete,
        is_identical,
        left,
        said: last,
        seconds,
        faults,
        unmade,
    })
}

fn store(world: &World, node: &str) -> PathBuf {
    world.cluster.directory().join(node)
}

/// Gives each node a disk of its own, which ends with the name space of the run.
fn make_disks_small(world: &mut World) -> Result<()> {
    for at in 1..=NODES.len() {
        let node = format!("n{at}");
        world.cluster.kill(&node)?;
        wipe(world, &node)?;
        fault::make_small(&store(world, &node), DISK)?;
        world.cluster.restart(&node)?;
    }
    Ok(())
}

/// Removes all that a node has; its directory may be a disk.
fn wipe(world: &World, node: &str) -> Result<()> {
    for entry in std::fs::read_dir(store(world, node))? {
        let path = entry?.path();
        match path.is_dir() {
            true => std::fs::remove_dir_all(path)?,
            false => std::fs::remove_file(path)?,
        }
    }
    Ok(())
}

/// What is down comes back so long after it failed, at most, in milliseconds.
const AWAY_MS: u64 = 9_000;
/// So many of a node's process and its home and catalog may be down at once: of six nodes some
/// must be left to go on.
const DOWN_MAX: usize = 3;

/// How a process comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Back {
    /// It is started again.
    Restart,
    /// It goes on.
    Continue,
    /// Its link carries packets again.
    Heal,
    /// Its disk has room again.
    Empty,
}

/// What somebody else fills a node's disk with.
const FILLER: &str = "filler";

/// Things that fail.
struct Chaos<'w> {
    world: &'w mut World,
    scheduler: &'w mut Child,
    path: &'w str,
    /// Whether links and disks may fail too.
    is_apart: bool,
    /// Processes that are down, until when, in milliseconds since the run began.
    down: Vec<(String, u64, Back)>,
    told: Vec<String>,
}

impl Chaos<'_> {
    /// Lets things fail for a while; in the end all is back.
    fn disturb(&mut self, seed: u64, watch: &Watch, faults: Duration) -> Result<()> {
        let mut dice = Dice::new(seed);
        let now_ms = || u64::try_from(watch.elapsed().as_millis()).unwrap_or(u64::MAX);
        let end_ms = u64::try_from(faults.as_millis())?;
        let mut next_ms = 500;
        while now_ms() < end_ms || !self.down.is_empty() {
            std::thread::sleep(Duration::from_millis(50));
            self.bring_back(now_ms())?;
            if now_ms() < next_ms || now_ms() >= end_ms {
                continue;
            }
            next_ms = now_ms() + 300 + dice.below(2_500);
            // All is back while the run goes on: a node that is away at its end keeps volumes
            // until their lifetime ends.
            let until_ms = now_ms() + 200 + dice.below(AWAY_MS);
            self.fail(&mut dice, until_ms.min(end_ms))?;
        }
        Ok(())
    }

    fn bring_back(&mut self, now_ms: u64) -> Result<()> {
        let is_due = |(_, until_ms, _): &mut (String, u64, Back)| *until_ms <= now_ms;
        let due: Vec<_> = self.down.extract_if(.., is_due).collect();
        for (name, _, back) in due {
            match back {
                Back::Restart => self.world.cluster.restart(&name)?,
                Back::Continue => self.world.cluster.signal(&name, Signal::SIGCONT)?,
                Back::Heal => fault::heal(&name)?,
                Back::Empty => std::fs::remove_file(store(self.world, &name).join(FILLER))?,
            }
        }
        Ok(())
    }

    fn fail(&mut self, dice: &mut Dice, until_ms: u64) -> Result<()> {
        let node = format!("n{}", 1 + dice.below(NODES.len() as u64));
        let (name, what) = match dice.below(if self.is_apart { 8 } else { 6 }) {
            0 => (node, "kill"),
            1 => (node, "wipe"),
            2 => (node, "stop"),
            3 => ("home".to_owned(), "stop"),
            4 => ("catalog".to_owned(), "kill"),
            5 => ("scheduler".to_owned(), "kill"),
            6 => (node, "cut"),
            _ => (node, "fill"),
        };
        let is_down = self.down.iter().any(|(down, ..)| *down == name);
        if is_down || self.down.len() >= DOWN_MAX {
            return Ok(());
        }
        if name == "scheduler" {
            if self.scheduler.try_wait()?.is_none() {
                self.told.push("kill:scheduler".to_owned());
                self.scheduler.kill()?;
                self.scheduler.wait()?;
                *self.scheduler = start(self.world, self.path)?;
            }
            return Ok(());
        }
        self.told.push(format!("{what}:{name}"));
        let back = self.break_one(&name, what)?;
        self.down.push((name, until_ms, back));
        Ok(())
    }

    fn break_one(&mut self, name: &str, what: &str) -> Result<Back> {
        Ok(match what {
            "stop" => {
                self.world.cluster.signal(name, Signal::SIGSTOP)?;
                Back::Continue
            }
            "cut" => {
                fault::cut(name, self.world.cluster.address(name))?;
                Back::Heal
            }
            "fill" => {
                fault::fill(&store(self.world, name).join(FILLER))?;
                Back::Empty
            }
            _ => {
                self.world.cluster.kill(name)?;
                if what == "wipe" {
                    wipe(self.world, name)?;
                }
                Back::Restart
            }
        })
    }
}

/// Volumes and agents that are left when servers have had time to notice.
fn left(world: &World) -> Result<Vec<String>> {
    let identity = world.cluster.identity();
    let agent = format!("agent --identity {}", identity.display());
    let mut left = Vec::new();
    for _ in 0..60 {
        let volumes = world.json(&["volume", "list"])?;
        let volumes = volumes.as_array().into_iter().flatten();
        let told = volumes.map(|volume| format!("{} on {}", volume["name"], volume["node"]));
        left = told.chain(processes_with(&agent)).collect();
        if left.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(left)
}
