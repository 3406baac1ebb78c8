//! A cluster for experiments, workflows of synthetic jobs, and the figures of a run on it.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_sched::JobStartOrder;
use bafs_sim::simulator::Policy;
use serde_json::Value;

use super::synthetic_job::JOB_PROCESS;
use crate::TestCluster;
use crate::api::BlockingClient;
use crate::bench::measure::Stopwatch;

/// Rate of the link to home: a twelfth of a node's, which is taken for 96 MB/s as all nodes share
/// the processors of one machine.
pub(super) const HOME_RATE: &str = "8MB/s";

/// The same in bytes per second.
pub(super) const HOME_BYTES_PER_S: u64 = 8_000_000;

/// No run of an experiment takes so long: the longest take a minute or two.
const RUN_TIMEOUT: Duration = Duration::from_secs(900);

/// Characters that are shown of why a run failed.
const REASON_CHARACTERS_MAX: usize = 600;

/// A node to start.
#[derive(Debug, Clone)]
pub(super) struct TestNodeSpec {
    pub(super) size: String,
    pub(super) slots: u32,
    /// Nodes of one group share caches.
    pub(super) group: String,
}

impl TestNodeSpec {
    pub(super) fn new(bytes: u64, slots: u32) -> Self {
        Self {
            size: format!("{bytes}B"),
            slots,
            group: "default".to_owned(),
        }
    }
}

/// A cluster, with a home behind a slow link.
#[derive(Debug)]
pub(super) struct TestBed {
    pub(super) test_cluster: TestCluster,
    client: BlockingClient,
    run_count: u32,
}

/// The figures of a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MeasuredRun {
    pub(super) seconds: f64,
    /// Bytes of files over the link to home, both directions.
    pub(super) home_bytes: u64,
    pub(super) executions: u64,
    /// Jobs that did not get done.
    pub(super) jobs_failed: u64,
    /// Jobs on nodes at once, as a mean over the run.
    pub(super) jobs_at_once: f64,
}

impl TestBed {
    pub(super) fn start(specs: &[TestNodeSpec], home_rate: &str) -> Result<Self> {
        let mut world =
            TestCluster::start_with_spec(&[], |spec| spec.home_rate = Some(home_rate.to_owned()))?;
        for (at, stop_request) in specs.iter().enumerate() {
            let slots = stop_request.slots.to_string();
            let more = [
                "--size",
                &stop_request.size,
                "--slots",
                &slots,
                "--group",
                &stop_request.group,
            ];
            world.cluster.add_node(&format!("n{}", at + 1), &more)?;
        }
        world.wait_for_servers(specs.len() + 1)?;
        let api = BlockingClient::new(&world.cluster.identity())?;
        Ok(Self {
            test_cluster: world,
            client: api,
            run_count: 0,
        })
    }

    /// Puts a file of so many bytes at home.
    pub(super) fn write_home(&self, path: &str, bytes: u64) -> Result<()> {
        let content: Vec<u8> = (0..bytes).map(|at| ((at * 31) >> 5) as u8).collect();
        self.test_cluster.write_home(path, &content)
    }

    fn read_home_bytes(&self) -> Result<u64> {
        let home = self.test_cluster.cluster.home_address();
        let counters = self
            .client
            .block_on(self.client.client().read_counters(home))?;
        let value = |name: &str| counters.get(name).copied().unwrap_or(0);
        Ok(value("home_read_bytes") + value("home_written_bytes"))
    }

    /// Runs a workflow; `meanwhile` is called again and again until it is over.
    pub(super) fn run_while(
        &mut self,
        workflow: &str,
        arguments: &[&str],
        mut meanwhile: impl FnMut(&mut TestCluster) -> Result<()>,
    ) -> Result<MeasuredRun> {
        self.run_count += 1;
        let path = self.test_cluster.write_workflow(workflow)?;
        let journal = self.last_journal();
        let before = self.read_home_bytes()?;
        let (path, journal) = (path.to_string_lossy(), journal.to_string_lossy());
        let mut command =
            self.test_cluster
                .bafs_command(&["run", &path, "--journal", &journal, "--json"]);
        command.args(arguments);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let report = collect_output(&mut child);
        let ended = wait_for_end(&mut child, || meanwhile(&mut self.test_cluster));
        if ended.is_err() {
            child.kill()?;
            child.wait()?;
        }
        ended?;
        let text = report
            .join()
            .map_err(|_| anyhow::anyhow!("reading the report failed"))??;
        let report: Value = serde_json::from_str(&text)
            .with_context(|| format!("bafs run {arguments:?} gave no report: {text}"))?;
        let home_bytes = self.read_home_bytes()? - before;
        parse_measured_run(&report, home_bytes)
    }

    /// Runs a workflow.
    pub(super) fn run_workflow(
        &mut self,
        workflow: &str,
        arguments: &[&str],
    ) -> Result<MeasuredRun> {
        self.run_while(workflow, arguments, |_| Ok(()))
    }

    /// Runs a workflow in an order.
    pub(super) fn run_in_order(
        &mut self,
        order: JobStartOrder,
        workflow: &str,
    ) -> Result<MeasuredRun> {
        self.run_workflow(workflow, &["--order", &Policy::Order(order).to_string()])
    }

    /// The journal of the last run.
    pub(super) fn last_journal(&self) -> PathBuf {
        self.test_cluster
            .home
            .path()
            .join(format!("journal{}", self.run_count))
    }
}

/// Waits until a run is over. A run that never ends must not block the measurement of the other
/// parts.
fn wait_for_end(child: &mut Child, mut meanwhile: impl FnMut() -> Result<()>) -> Result<()> {
    let watch = Stopwatch::start();
    while child.try_wait()?.is_none() {
        meanwhile()?;
        ensure!(
            watch.elapsed() < RUN_TIMEOUT,
            "a run took longer than {RUN_TIMEOUT:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Reads the output of a running process, which would block otherwise.
fn collect_output(child: &mut Child) -> std::thread::JoinHandle<Result<String>> {
    let out = child.stdout.take();
    std::thread::spawn(move || {
        let out = out.context("standard output is piped")?;
        Ok(std::io::read_to_string(out)?)
    })
}

fn parse_measured_run(report: &Value, home_bytes: u64) -> Result<MeasuredRun> {
    if report["outcome"] != "Complete" {
        let why = report["outcome"].to_string();
        let why: String = why.chars().take(REASON_CHARACTERS_MAX).collect();
        println!("  a run did not end complete: {why}");
    }
    let number = |name: &str| report["totals"][name].as_u64().context(name.to_owned());
    let wall_ms = report["wall_ms"].as_u64().context("wall_ms")?;
    let jobs = report["jobs"].as_array().context("jobs")?;
    let ran_ms: u64 = jobs.iter().filter_map(|job| job["wall_ms"].as_u64()).sum();
    Ok(MeasuredRun {
        seconds: wall_ms as f64 / 1e3,
        home_bytes,
        executions: number("executions")?,
        jobs_failed: number("jobs_total")? - number("jobs_done")?,
        jobs_at_once: ran_ms as f64 / wall_ms.max(1) as f64,
    })
}

/// The text of a workflow of synthetic jobs.
#[derive(Debug, Default)]
pub(super) struct WorkflowText(pub(super) String);

impl WorkflowText {
    /// Another line.
    pub(super) fn add_line(&mut self, line: &str) {
        self.0 += line;
        self.0.push('\n');
    }

    /// Another job that does these steps.
    pub(super) fn add_job(&mut self, name: &str, steps: &[String]) -> Result<()> {
        let tool = std::env::current_exe()?;
        let tool = tool.to_str().context("the program's path is text")?;
        let steps = steps.join(" ");
        writeln!(
            self.0,
            "job {name} {{\nexecutable = {tool}\narguments = {JOB_PROCESS} {steps}\n}}"
        )?;
        Ok(())
    }
}

/// All of these must have been done, or the times compare different work.
pub(super) fn ensure_all_done(name: &str, took: &MeasuredRun) -> Result<()> {
    ensure!(
        took.jobs_failed == 0,
        "{name}: {} jobs failed",
        took.jobs_failed
    );
    Ok(())
}
