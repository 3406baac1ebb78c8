//! A real Prometheus reads the figures of every server and of a run, and understands all of them.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, find_tool, mount_obstacle, printed_text, report_skip};
use serde_json::Value;

const WORKFLOW: &str = "volume data cache bafs://home/data 4 MB\n\
    volume work scratch 4 MB files 10\n\
    job first {\n\
      executable = /bin/sh\n\
      arguments = -c \"cat /data/one > /scratch/all; sleep 6\"\n\
    }\n\
    mount data first /data\nmount work first /scratch\n\
    extract work all bafs://home/out\n";

/// A process that ends with the test.
struct PrometheusProcess(Child);

impl Drop for PrometheusProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn find_free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Starts Prometheus, which reads all targets twice a second.
fn start_prometheus(directory: &Path, targets: &[String], port: u16) -> Result<PrometheusProcess> {
    let config = directory.join("prometheus.yml");
    let list = serde_json::to_string(targets)?;
    std::fs::write(
        &config,
        format!(
            "global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}\n\
             scrape_configs:\n- job_name: bafs\n  static_configs:\n  - targets: {list}\n"
        ),
    )?;
    let started = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            directory.join("data").display()
        ))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(PrometheusProcess(started))
}

/// The page at an address.
fn fetch_page(address: &str) -> Result<String> {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, page) = answer.split_once("\r\n\r\n").context("an HTTP answer")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(page.to_owned())
}

/// Asks Prometheus with its own tool; the values of a query, by the address that told them.
fn query_prometheus(server: &str, what: &str) -> Result<Vec<(String, f64)>> {
    let output = Command::new("promtool")
        .args(["query", "instant", "--format", "json", server, what])
        .output()?;
    let found: Value =
        serde_json::from_slice(&output.stdout).with_context(|| printed_text(&output))?;
    let mut values = Vec::new();
    for row in found.as_array().context("a vector")? {
        let instance = row["metric"]["instance"].as_str().unwrap_or_default();
        let value = row["value"][1].as_str().context("a value")?;
        values.push((instance.to_owned(), value.parse()?));
    }
    Ok(values)
}

fn wait_for_home_bytes(world: &TestCluster, server: &str) -> Result<()> {
    let home = world.cluster.metrics_address("home").to_owned();
    let is_read = |(at, bytes): &(String, f64)| *at == home && *bytes >= 2e6;
    for _ in 0..50 {
        if query_prometheus(server, "bafs_home_read_bytes_total")?
            .iter()
            .any(is_read)
        {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    anyhow::bail!("Prometheus does not know what home sent")
}

#[test]
fn cluster_metrics_are_read_by_prometheus() -> Result<()> {
    let name = "cluster_metrics_are_read_by_prometheus";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    if find_tool("prometheus").is_none() || find_tool("promtool").is_none() {
        report_skip(name, "no prometheus on this machine");
        return Ok(());
    }
    let world = TestCluster::start_with_spec(&["30MB", "30MB"], |spec| spec.has_metrics = true)?;
    world.wait_for_servers(3)?;
    world.write_home("data/one", &vec![7; 2_000_000])?;
    let (run_address, port) = (
        format!("127.0.0.1:{}", find_free_port()?),
        find_free_port()?,
    );
    let mut targets: Vec<String> = ["catalog", "home", "n1", "n2"]
        .iter()
        .map(|server| world.cluster.metrics_address(server).to_owned())
        .collect();
    targets.push(run_address.clone());
    let directory = tempfile::tempdir()?;
    let _prometheus = start_prometheus(directory.path(), &targets, port)?;
    let server = format!("http://127.0.0.1:{port}");
    let workflow = world.write_workflow(WORKFLOW)?;
    let mut run = world.bafs_command(&[
        "run",
        &workflow.to_string_lossy(),
        "--metrics",
        &run_address,
    ]);
    let run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut was_running = false;
    let mut up = Vec::new();
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(200));
        let Ok(running) = query_prometheus(&server, "bafs_run_jobs_running") else {
            continue;
        };
        was_running = running
            .iter()
            .any(|(at, jobs)| *at == run_address && *jobs == 1.0);
        up = query_prometheus(&server, "up == 1")?;
        if was_running && up.len() == targets.len() {
            break;
        }
    }
    ensure!(was_running, "the job was not seen to run");
    ensure!(
        up.len() == targets.len(),
        "Prometheus could not read all: {up:?}"
    );
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    wait_for_home_bytes(&world, &server)?;
    for server in ["catalog", "home", "n1", "n2"] {
        let page = fetch_page(world.cluster.metrics_address(server))?;
        ensure!(!page.contains("Not documented"), "{server}:\n{page}");
        ensure!(page.contains("bafs_calls_total{call="), "{server}:\n{page}");
    }
    Ok(())
}
