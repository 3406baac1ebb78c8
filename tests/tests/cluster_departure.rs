//! Nodes that leave: what only they have goes to others in time.

use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::Signal;

/// Jobs whose data stay unread until a job ends that waits for a file.
const PIPELINES: u32 = 6;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Shorter than the grace of a node, 25 s.
const DEPARTURE_MAX: Duration = Duration::from_secs(15);

/// A run whose first jobs are done, and whose second ones wait for a word.
struct WaitingRun {
    cluster: TestCluster,
    workflow: PathBuf,
    run: Child,
}

impl WaitingRun {
    fn start(test: &str) -> Result<Option<Self>> {
        if let Some(reason) = mount_obstacle() {
            report_skip(test, &reason);
            return Ok(None);
        }
        let cluster = TestCluster::start(&["100MB", "100MB", "100MB"])?;
        cluster.wait_for_servers(4)?;
        let home = cluster.home.path().display().to_string();
        let mut text = format!(
            "job gate {{\nexecutable = /bin/sh\n\
             arguments = -c \"until test -e {home}/go; do sleep 0.05; done\"\n}}\n"
        );
        for at in 1..=PIPELINES {
            text += &format!(
                "volume v{at} scratch 1 MB\njob a{at} {{\nexecutable = /bin/sh\n\
                 arguments = -c \"echo {at} > /v/part; echo {at} >> {home}/begun\"\n}}\n\
                 job b{at} {{\nexecutable = /bin/sh\n\
                 arguments = -c \"cat /v/part > /v/whole\"\n}}\n\
                 mount v{at} a{at} /v\nmount v{at} b{at} /v\nparent a{at} child b{at}\n\
                 parent gate child b{at}\nextract v{at} whole bafs://home/out/{at}\n"
            );
        }
        let workflow = cluster.write_workflow(&text)?;
        let path = workflow.display().to_string();
        let arguments = ["run", &path, "--json", "--policy", "replication=never"];
        let mut command = cluster.bafs_command(&arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let run = command.spawn().context("bafs run starts")?;
        let waiting = Self {
            cluster,
            workflow,
            run,
        };
        wait_until(TIMEOUT, || {
            // Before the run has a journal there is no status.
            let status = waiting.read_status();
            Ok(status.is_ok_and(|status| status["progress"]["jobs_done"] == PIPELINES))
        })
        .with_context(|| format!("{:?}", waiting.read_status()))?;
        Ok(Some(waiting))
    }

    fn read_status(&self) -> Result<serde_json::Value> {
        let path = self.workflow.display().to_string();
        self.cluster.run_json(&["status", &path])
    }

    /// Scratch volumes of a node.
    fn count_volumes(&self, node: &str) -> Result<usize> {
        let listed = self.cluster.run_json(&["volume", "list"])?;
        let volumes = listed["volumes"].as_array().or_else(|| listed.as_array());
        let volumes = volumes.context("a list")?.iter();
        Ok(volumes.filter(|volume| volume["node"] == node).count())
    }

    /// The node with most of the data.
    fn fullest_node(&self) -> Result<&'static str> {
        let counted = ["n1", "n2", "n3"].map(|node| (self.count_volumes(node), node));
        let mut fullest = (0, "");
        for (count, node) in counted {
            fullest = fullest.max((count?, node));
        }
        ensure!(fullest.0 > 0, "no node has data");
        Ok(fullest.1)
    }

    /// Lets the run end, and checks that each job ran once.
    fn finish(self) -> Result<()> {
        self.cluster.write_home("go", b"")?;
        let output = self.run.wait_with_output()?;
        check_report(&output, self.cluster.home.path())
    }
}

fn check_report(output: &Output, home: &Path) -> Result<()> {
    ensure!(output.status.success(), "{}", printed_text(output));
    let begun = std::fs::read_to_string(home.join("begun"))?;
    ensure!(
        begun.lines().count() == PIPELINES as usize,
        "a finished job ran again: {begun} {}",
        printed_text(output)
    );
    for at in 1..=PIPELINES {
        let result = std::fs::read_to_string(home.join(format!("out/{at}")))?;
        ensure!(result == format!("{at}\n"), "{result}");
    }
    Ok(())
}

#[test]
fn cluster_terminated_node_loses_no_job() -> Result<()> {
    let Some(waiting) = WaitingRun::start("cluster_terminated_node_loses_no_job")? else {
        return Ok(());
    };
    let node = waiting.fullest_node()?;
    // The job that waits may run there: it must end for the node to be empty.
    waiting.cluster.cluster.signal(node, Signal::SIGTERM)?;
    wait_until(DEPARTURE_MAX, || Ok(waiting.count_volumes(node)? == 0)).context("it empties")?;
    waiting.cluster.write_home("go", b"")?;
    let has_gone = || {
        let listed = waiting.cluster.run_json(&["servers"])?;
        Ok(!listed.to_string().contains(&format!("\"{node}\"")))
    };
    wait_until(DEPARTURE_MAX, has_gone).context("it leaves the catalog")?;
    waiting.finish()
}

#[test]
fn cluster_drained_node_is_empty() -> Result<()> {
    let Some(waiting) = WaitingRun::start("cluster_drained_node_is_empty")? else {
        return Ok(());
    };
    let node = waiting.fullest_node()?;
    let drained = waiting.cluster.run_json(&["drain", node, "--no-wait"])?;
    ensure!(drained["is_empty"] == false, "{drained}");
    wait_until(DEPARTURE_MAX, || Ok(waiting.count_volumes(node)? == 0)).context("it empties")?;
    waiting.cluster.write_home("go", b"")?;
    let drained = waiting.cluster.run_json(&["drain", node])?;
    ensure!(drained["is_empty"] == true, "{drained}");
    waiting.finish()
}

/// The node says until when it lives; the run moves its data before that.
#[test]
fn cluster_node_leaves_in_time() -> Result<()> {
    let test = "cluster_node_leaves_in_time";
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let mut cluster = TestCluster::start(&["100MB"])?;
    let short = ["--until", "9s", "--grace", "6s", "--size", "100MB"];
    cluster.cluster.add_node("n2", &short)?;
    cluster.wait_for_servers(3)?;
    let long = "executable = /bin/sh\nruntime = 30 s\n";
    let text = format!(
        "for i in 1..2\njob j$(i) {{\n{long}arguments = -c \"sleep 1; echo done\"\n}}\nend\n"
    );
    let workflow = cluster.write_workflow(&text)?.display().to_string();
    let report = cluster.run_json(&["run", &workflow])?;
    let nodes = report["jobs"].as_array().context("jobs")?.iter();
    let nodes: Vec<_> = nodes.map(|job| job["node"].clone()).collect();
    ensure!(nodes == ["n1", "n1"], "{nodes:?}");
    let is_gone = || Ok(cluster.run_json(&["servers"])?.as_array().map(Vec::len) == Some(2));
    wait_until(DEPARTURE_MAX, is_gone).context("the node ends by itself")?;
    Ok(())
}
