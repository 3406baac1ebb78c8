//! Nodes that were away in the middle of an upload, and go on when newer results are at home; and
//! runs that write to one target at once, while homes and nodes are killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::seeded_rng::SeededRng;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::Signal;

/// Bytes of a result: the link to home needs some seconds for it.
const RESULT_BYTES: usize = 5_000_000;
const HOME_RATE: &str = "1MB/s";

/// A node is stopped when so much of its result is at home, in bytes.
const STOP_AFTER_BYTES: u64 = 300_000;

const TIMEOUT: Duration = Duration::from_secs(120);

/// What follows when a late node has gone on, at most: the server's retries are 2 s apart.
const LATE_TIMEOUT: Duration = Duration::from_secs(60);

/// A job that writes the word many times, and how its results go home.
fn workflow(word: &str, files: &[&str], extract: &str) -> String {
    let write = |file: &&str| format!("yes {word} | head -c {RESULT_BYTES} > /o/{file}; ");
    let script: String = files.iter().map(write).collect();
    format!(
        "volume o scratch 20 MB files 20\njob j {{\nexecutable = sh\n\
         arguments = -c \"{script}\"\n}}\nmount o j /o\nextract o {extract}\n"
    )
}

fn content(word: &str) -> Vec<u8> {
    let line = format!("{word}\n").into_bytes();
    line.iter().copied().cycle().take(RESULT_BYTES).collect()
}

struct LateBench {
    world: TestCluster,
}

impl LateBench {
    fn start(test: &str) -> Result<Option<Self>> {
        if let Some(reason) = mount_obstacle() {
            report_skip(test, &reason);
            return Ok(None);
        }
        let world = TestCluster::start_with_home_rate(&["60MB"], Some(HOME_RATE))?;
        world.wait_for_servers(2)?;
        Ok(Some(Self { world }))
    }

    fn spawn_run(&self, workflow: &Path) -> Result<Child> {
        let path = workflow.display().to_string();
        let mut command = self.world.bafs_command(&["run", &path]);
        let log = fs::File::create(workflow.with_extension("log"))?;
        Ok(command.stdout(Stdio::null()).stderr(log).spawn()?)
    }

    fn run(&self, workflow: &Path) -> Result<()> {
        let path = workflow.display().to_string();
        let output = self.world.bafs_command(&["run", &path]).output()?;
        ensure!(output.status.success(), printed_text(&output));
        Ok(())
    }

    fn staged_bytes(&self) -> u64 {
        let data = self.world.home.path().join(".bafs-put/data");
        let files = fs::read_dir(data).into_iter().flatten().flatten();
        files.filter_map(|it| Some(it.metadata().ok()?.len())).sum()
    }

    /// The first node is stopped while it sends the first result; another run's result comes
    /// meanwhile. Then the first node goes on, and is refused.
    fn check_late_node(&mut self, files: &[&str], extract: &str) -> Result<()> {
        let path = self
            .world
            .write_workflow(&workflow("old", files, extract))?;
        let mut first = self.spawn_run(&path)?;
        wait_until(TIMEOUT, || Ok(self.staged_bytes() >= STOP_AFTER_BYTES))?;
        self.world.cluster.signal("n1", Signal::SIGSTOP)?;
        let more = ["--size", "60MB", "--slots", "2"];
        self.world.cluster.add_node("n2", &more)?;
        let ended = first.wait()?;
        let told = fs::read_to_string(path.with_extension("log"))?;
        ensure!(ended.success(), "{told}");
        self.world
            .write_workflow(&workflow("new", files, extract))?;
        self.run(&path)?;
        self.world.cluster.signal("n1", Signal::SIGCONT)?;
        let log = self.world.cluster.directory().join("n1.log");
        let is_refused = || Ok(fs::read_to_string(&log)?.contains("a result stays on this node"));
        wait_until(LATE_TIMEOUT, is_refused).with_context(|| log.display().to_string())
    }
}

#[test]
fn cluster_late_node_replaces_no_newer_result() -> Result<()> {
    let test = "cluster_late_node_replaces_no_newer_result";
    let Some(mut bench) = LateBench::start(test)? else {
        return Ok(());
    };
    bench.check_late_node(&["r"], "r bafs://home/r")?;
    let found = bench.world.read_home("r")?;
    ensure!(found == content("new"), "the older result came back");
    wait_until(LATE_TIMEOUT, || Ok(bench.staged_bytes() == 0))
}

#[test]
fn cluster_late_node_mixes_no_newer_set() -> Result<()> {
    let Some(mut bench) = LateBench::start("cluster_late_node_mixes_no_newer_set")? else {
        return Ok(());
    };
    bench.check_late_node(&["a", "b"], "./ bafs://home/set/")?;
    for name in ["set/a", "set/b"] {
        let found = bench.world.read_home(name)?;
        ensure!(found == content("new"), "{name} came back");
    }
    let manifest = bench.world.read_home("set/bafs-manifest.json")?;
    let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
    ensure!(manifest["complete"] == true, "{manifest}");
    Ok(())
}

/// Two runs of two workflows write to one target; home, a node and a run are killed at random.
#[test]
fn cluster_kills_leave_one_whole_result() -> Result<()> {
    let Some(mut bench) = LateBench::start("cluster_kills_leave_one_whole_result")? else {
        return Ok(());
    };
    let mut random = SeededRng::new(7);
    let more = ["--size", "60MB", "--slots", "2"];
    bench.world.cluster.add_node("n2", &more)?;
    bench.world.wait_for_servers(3)?;
    for round in 0..3 {
        let words = [format!("first{round}"), format!("second{round}")];
        let paths: Vec<PathBuf> = (0..2)
            .map(|at| bench.world.home.path().join(format!("w{at}.bafs")))
            .collect();
        for (word, path) in words.iter().zip(&paths) {
            fs::write(path, workflow(word, &["r"], "r bafs://home/r"))?;
        }
        let mut runs = Vec::new();
        for path in &paths {
            runs.push(bench.spawn_run(path)?);
        }
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(300 + random.next_below(1_500)));
            match random.next_below(3) {
                0 => {
                    bench.world.cluster.kill("home")?;
                    bench.world.cluster.restart("home")?;
                }
                1 => {
                    let name = random.choose(&["n1", "n2"]);
                    bench.world.cluster.kill(name)?;
                    bench.world.cluster.restart(name)?;
                }
                _ => {
                    let at = usize::try_from(random.next_below(2))?;
                    runs[at].kill()?;
                    runs[at].wait()?;
                    runs[at] = bench.spawn_run(&paths[at])?;
                }
            }
        }
        for (run, path) in runs.iter_mut().zip(&paths) {
            let ended = run.wait()?;
            let told = fs::read_to_string(path.with_extension("log"))?;
            ensure!(ended.success(), "{told}");
        }
        let found = bench.world.read_home("r")?;
        let is_whole = words.iter().any(|word| found == content(word));
        let start = String::from_utf8_lossy(found.get(..20).unwrap_or(&found)).into_owned();
        ensure!(is_whole, "round {round}: {} bytes, {start}", found.len());
    }
    Ok(())
}
