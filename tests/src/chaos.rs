//! A chaos run with real processes: nodes are killed, stopped, restarted and lose their disks,
//! their links are cut, their disks are full, home stops, the catalog and the scheduler are killed,
//! several at once, while a workflow runs. Then it checks the files at home and the leftovers.
//!
//! Links and disks can fail only where the run may have a network and mounts of its own.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::bench::measure::Stopwatch;
use crate::bench::nohang::fault_scenario;
use crate::seeded_rng::SeededRng;
use crate::{TestCluster, processes_matching};

const WIDTH: u32 = 40;
const DEPTH: u32 = 4;
const NODES: [&str; 6] = ["40MB"; 6];

/// Jobs that the nodes run at once.
const SLOTS: u32 = 2 * NODES.len() as u32;
/// A run takes so much longer than things fail: a node that is away at its end, or has just come
/// back, keeps volumes until their lifetime ends.
const QUIET_PERIOD: Duration = Duration::from_secs(10);

/// Most bytes of the scheduler's output in the report.
const OUTPUT_TAIL_LINES: usize = 20;

/// A longer run is stopped.
const RUN_TIMEOUT_S: u64 = 600;

/// The result of a run.
#[derive(Debug)]
pub struct ChaosOutcome {
    /// Whether every job is done and every file at home.
    pub is_complete: bool,
    /// Whether all files are those of a run without faults.
    pub is_identical: bool,
    /// Leftover volumes and agents.
    pub leftovers: Vec<String>,
    /// The end of the scheduler's output, if the run is not complete.
    pub output_tail: String,
    /// How long it took.
    pub seconds: f64,
    /// The failed servers, in order.
    pub faults: Vec<String>,
    /// Why links and disks could not fail, if so.
    pub isolation_obstacle: Option<String>,
}

/// Each job passes on its predecessor's output with a line of its own; all jobs read a cache. With
/// all slots in use, and nothing failing, the jobs take `least` together.
fn workflow_text(least: Duration) -> String {
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

/// The expected content of each file, made without BAFS.
fn expected_result(data: &[u8], p: u32) -> Result<Vec<u8>> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), data)?;
    let script = "cat $0; for at in $(seq 0 $2); do cksum < $0; echo $1 $at; done";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script]).arg(file.path());
    command.args([p.to_string(), (DEPTH - 1).to_string()]);
    Ok(command.output()?.stdout)
}

fn start_scheduler(world: &TestCluster, path: &str) -> Result<Child> {
    let mut command = world.bafs_command(&["run", path, "--json"]);
    let said = OpenOptions::new()
        .create(true)
        .append(true)
        .open(output_path(world))?;
    command.stdout(said.try_clone()?).stderr(said);
    command.spawn().context("bafs run starts")
}

/// Where the schedulers of a run say what happens.
fn output_path(world: &TestCluster) -> PathBuf {
    world.cluster.directory().join("said")
}

/// The disk of a node has so much more than it offers.
const DISK_HEADROOM: &str = "64m";

/// One run with the faults of a seed, which begin within so long.
///
/// # Errors
/// No cluster, or a process that cannot be killed or started again.
pub fn run_chaos(seed: u64, faults: Duration) -> Result<ChaosOutcome> {
    // A thread that lives apart stays so, and so does all that it starts.
    let run = std::thread::spawn(move || run_isolated(seed, faults));
    let ended = run.join();
    ended.unwrap_or_else(|_| Err(anyhow::anyhow!("the run panicked")))
}

fn run_isolated(seed: u64, faults: Duration) -> Result<ChaosOutcome> {
    let unmade = fault_scenario::isolation_obstacle();
    if unmade.is_none() {
        fault_scenario::enter_private_namespaces()?;
    }
    let mut world = TestCluster::start(&NODES)?;
    if unmade.is_none() {
        mount_small_disks(&mut world)?;
    }
    world.wait_for_servers(NODES.len() + 1)?;
    let data: Vec<u8> = (0..5_000u32)
        .flat_map(|n| format!("{n}\n").into_bytes())
        .collect();
    world.write_home("data/all", &data)?;
    let path = world
        .write_workflow(&workflow_text(faults + QUIET_PERIOD))?
        .to_string_lossy()
        .into_owned();
    let watch = Stopwatch::start();
    let mut scheduler = start_scheduler(&world, &path)?;
    let mut chaos = ChaosFaults {
        world: &mut world,
        scheduler: &mut scheduler,
        workflow_path: &path,
        is_isolated: unmade.is_none(),
        servers_down: Vec::new(),
        fault_log: Vec::new(),
    };
    chaos.inject_faults(seed, &watch, faults)?;
    let faults = chaos.fault_log;
    let is_complete = loop {
        if let Some(status) = scheduler.try_wait()? {
            break status.success();
        }
        if watch.elapsed().as_secs() > RUN_TIMEOUT_S {
            scheduler.kill()?;
            scheduler.wait()?;
            break false;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let seconds = watch.elapsed().as_secs_f64();
    let mut is_identical = true;
    for p in 0..WIDTH {
        let found = world.read_home(&format!("out/{p}")).unwrap_or_default();
        is_identical &= found == expected_result(&data, p)?;
    }
    let mut last = String::new();
    if !is_complete {
        let all = std::fs::read_to_string(output_path(&world))?;
        let lines: Vec<&str> = all.lines().collect();
        last = lines[lines.len().saturating_sub(OUTPUT_TAIL_LINES)..].join("\n");
    }
    let left = find_leftovers(&world)?;
    for at in (1..=NODES.len()).filter(|_| unmade.is_none()) {
        fault_scenario::unmount_small_disk(&store_path(&world, &format!("n{at}")))?;
    }
    Ok(ChaosOutcome {
        is_complete,
        is_identical,
        leftovers: left,
        output_tail: last,
        seconds,
        faults,
        isolation_obstacle: unmade,
    })
}

fn store_path(world: &TestCluster, node: &str) -> PathBuf {
    world.cluster.directory().join(node)
}

/// Gives each node a disk of its own, which ends with the name space of the run.
fn mount_small_disks(world: &mut TestCluster) -> Result<()> {
    for at in 1..=NODES.len() {
        let node = format!("n{at}");
        world.cluster.kill(&node)?;
        wipe_store(world, &node)?;
        fault_scenario::mount_small_disk(&store_path(world, &node), DISK_HEADROOM)?;
        world.cluster.restart(&node)?;
    }
    Ok(())
}

/// Removes all that a node has; its directory may be a disk.
fn wipe_store(world: &TestCluster, node: &str) -> Result<()> {
    for entry in std::fs::read_dir(store_path(world, node))? {
        let path = entry?.path();
        match path.is_dir() {
            true => std::fs::remove_dir_all(path)?,
            false => std::fs::remove_file(path)?,
        }
    }
    Ok(())
}

/// Longest absence after a failure, in milliseconds.
const DOWNTIME_MS_MAX: u64 = 9_000;
/// How many nodes, home and catalog processes may be down at once: some of six nodes must continue.
const SERVERS_DOWN_MAX: usize = 3;

/// How a process comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recovery {
    /// It is started again.
    RestartServer,
    /// It continues.
    ResumeServer,
    /// Its link carries packets again.
    RestoreLink,
    /// Its disk has room again.
    FreeDisk,
}

/// The file with which another user fills a node's disk.
const FILLER_FILE: &str = "filler";

/// Things that fail.
struct ChaosFaults<'w> {
    world: &'w mut TestCluster,
    scheduler: &'w mut Child,
    workflow_path: &'w str,
    /// Whether links and disks may fail too.
    is_isolated: bool,
    /// Processes that are down, until when, in milliseconds since the run began.
    servers_down: Vec<(String, u64, Recovery)>,
    fault_log: Vec<String>,
}

impl ChaosFaults<'_> {
    /// Lets things fail for a while; in the end all is back.
    fn inject_faults(&mut self, seed: u64, watch: &Stopwatch, faults: Duration) -> Result<()> {
        let mut rng = SeededRng::new(seed);
        let now_ms = || u64::try_from(watch.elapsed().as_millis()).unwrap_or(u64::MAX);
        let end_ms = u64::try_from(faults.as_millis())?;
        let mut next_ms = 500;
        while now_ms() < end_ms || !self.servers_down.is_empty() {
            std::thread::sleep(Duration::from_millis(50));
            self.recover_due(now_ms())?;
            if now_ms() < next_ms || now_ms() >= end_ms {
                continue;
            }
            next_ms = now_ms() + 300 + rng.next_below(2_500);
            // All servers return during the run: a node that is absent at its end keeps volumes
            // until their lifetime ends.
            let until_ms = now_ms() + 200 + rng.next_below(DOWNTIME_MS_MAX);
            self.inject_fault(&mut rng, until_ms.min(end_ms))?;
        }
        Ok(())
    }

    fn recover_due(&mut self, now_ms: u64) -> Result<()> {
        let is_due = |(_, until_ms, _): &mut (String, u64, Recovery)| *until_ms <= now_ms;
        let due: Vec<_> = self.servers_down.extract_if(.., is_due).collect();
        for (name, _, back) in due {
            match back {
                Recovery::RestartServer => self.world.cluster.restart(&name)?,
                Recovery::ResumeServer => self.world.cluster.signal(&name, Signal::SIGCONT)?,
                Recovery::RestoreLink => fault_scenario::restore_link(&name)?,
                Recovery::FreeDisk => {
                    std::fs::remove_file(store_path(self.world, &name).join(FILLER_FILE))?
                }
            }
        }
        Ok(())
    }

    fn inject_fault(&mut self, rng: &mut SeededRng, until_ms: u64) -> Result<()> {
        let node = format!("n{}", 1 + rng.next_below(NODES.len() as u64));
        let (name, what) = match rng.next_below(if self.is_isolated { 8 } else { 6 }) {
            0 => (node, "kill"),
            1 => (node, "wipe"),
            2 => (node, "stop"),
            3 => ("home".to_owned(), "stop"),
            4 => ("catalog".to_owned(), "kill"),
            5 => ("scheduler".to_owned(), "kill"),
            6 => (node, "cut"),
            _ => (node, "fill"),
        };
        let is_down = self.servers_down.iter().any(|(down, ..)| *down == name);
        if is_down || self.servers_down.len() >= SERVERS_DOWN_MAX {
            return Ok(());
        }
        if name == "scheduler" {
            if self.scheduler.try_wait()?.is_none() {
                self.fault_log.push("kill:scheduler".to_owned());
                self.scheduler.kill()?;
                self.scheduler.wait()?;
                *self.scheduler = start_scheduler(self.world, self.workflow_path)?;
            }
            return Ok(());
        }
        self.fault_log.push(format!("{what}:{name}"));
        let back = self.break_server(&name, what)?;
        self.servers_down.push((name, until_ms, back));
        Ok(())
    }

    fn break_server(&mut self, name: &str, what: &str) -> Result<Recovery> {
        Ok(match what {
            "stop" => {
                self.world.cluster.signal(name, Signal::SIGSTOP)?;
                Recovery::ResumeServer
            }
            "cut" => {
                fault_scenario::cut_link(name, self.world.cluster.address(name))?;
                Recovery::RestoreLink
            }
            "fill" => {
                fault_scenario::fill_disk(&store_path(self.world, name).join(FILLER_FILE))?;
                Recovery::FreeDisk
            }
            _ => {
                self.world.cluster.kill(name)?;
                if what == "wipe" {
                    wipe_store(self.world, name)?;
                }
                Recovery::RestartServer
            }
        })
    }
}

/// Volumes and agents that are left when servers have had time to notice.
fn find_leftovers(world: &TestCluster) -> Result<Vec<String>> {
    let identity = world.cluster.identity();
    let agent = format!("agent --identity {}", identity.display());
    let mut left = Vec::new();
    for _ in 0..60 {
        let volumes = world.run_json(&["volume", "list"])?;
        let volumes = volumes.as_array().into_iter().flatten();
        let told = volumes.map(|volume| format!("{} on {}", volume["name"], volume["node"]));
        left = told.chain(processes_matching(&agent)).collect();
        if left.is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(left)
}
