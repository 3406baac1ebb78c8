//! A real service, and calls to it over one connection for each user. Measures nothing.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::bearer::Bearer;
use bafs_proto::identity::Identity;
use bafs_proto::message::Role;
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::queue_call::CallQueue;
use bafs_proto::time::Deadline;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::super::measure::{Stopwatch, time_of_day};
use crate::api::BlockingClient;
use crate::{TestCluster, printed_text, processes_matching};

const TIMEOUT_MS: u64 = 30_000;

/// A workflow that could run.
const TEXT: &str = "volume v scratch 10 MB\njob a {\nexecutable = /bin/true\n}\nmount v a /v\n";

/// A cluster with a service.
pub(super) struct TestQueue {
    pub(super) world: TestCluster,
    state: TempDir,
    process: Option<Child>,
    address: String,
    runtime: Runtime,
}

/// A user with a connection.
pub(super) struct TestUser {
    name: String,
    identity: PathBuf,
    pool: Pool,
    bearer: Arc<Bearer>,
}

impl TestQueue {
    pub(super) fn start(nodes: &[&str]) -> Result<Self> {
        let world = TestCluster::start(nodes)?;
        world.wait_for_servers(nodes.len() + 1)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let mut queue = Self {
            world,
            state: tempfile::tempdir()?,
            process: None,
            address: String::new(),
            runtime,
        };
        queue.start_process()?;
        Ok(queue)
    }

    pub(super) fn start_process(&mut self) -> Result<()> {
        let mut command = self.world.bafs_command(&["scheduler", "--json", "--state"]);
        command.arg(self.state.path().join("state"));
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().context("it has an output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        self.process = Some(child);
        let line: Value = serde_json::from_str(&line).context("it says where it listens")?;
        self.address = line["listening"].as_str().context("an address")?.to_owned();
        Ok(())
    }

    pub(super) fn kill(&mut self) -> Result<()> {
        let mut child = self.process.take().context("it runs")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    pub(super) fn add_user(&self, name: &str) -> Result<TestUser> {
        self.add_user_with(name, &[])
    }

    /// The directory of the identity with which the runs of a user act.
    pub(super) fn run_identity(&self, user: &str) -> Result<PathBuf> {
        let users = self.state.path().join("state/users");
        for entry in std::fs::read_dir(&users)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name
                .strip_prefix(user)
                .is_some_and(|rest| rest.starts_with('-'))
            {
                return Ok(entry.path());
            }
        }
        bail!("no run of {user} has begun")
    }

    pub(super) fn add_user_with(&self, name: &str, options: &[&str]) -> Result<TestUser> {
        let to = self.state.path().join(name);
        let mut command = self.world.bafs_command(&["user", "add", name, "--service"]);
        let output = command
            .arg(&self.address)
            .arg("--to")
            .arg(&to)
            .args(options)
            .output()?;
        ensure!(output.status.success(), printed_text(&output));
        let identity = Identity::load(&to.join("agent"), Role::Agent)?;
        let _entered = self.runtime.enter();
        Ok(TestUser {
            name: name.to_owned(),
            identity: to,
            pool: Pool::new(Arc::new(Dialer::new(&identity)?)),
            bearer: Arc::new(Bearer::new(
                identity.token.clone(),
                identity.verifier.clone(),
            )),
        })
    }

    pub(super) fn submit(&self, user: &TestUser, name: &str) -> Result<u64> {
        self.submit_text(user, name, TEXT)
    }

    pub(super) fn submit_text(&self, user: &TestUser, name: &str, text: &str) -> Result<u64> {
        let request = json!({ "submit": { "name": name, "text": text, "key": name } });
        let asked = ask(user, self.address.clone(), request);
        let answer = self.runtime.block_on(asked)?;
        answer["workflow"].as_u64().context("a number")
    }

    /// Asks, and returns after some time, whatever becomes of it.
    pub(super) fn submit_without_answer(&self, user: &TestUser, name: &str, wait: Duration) {
        let request = json!({ "submit": { "name": name, "text": TEXT, "key": name } });
        self.runtime.spawn(ask(user, self.address.clone(), request));
        std::thread::sleep(wait);
    }

    /// Names of all workflows.
    pub(super) fn list(&self) -> Result<BTreeMap<u64, String>> {
        let rows = self.list_rows()?;
        let rows = rows.into_iter().map(|row| {
            let name = row["details"]["name"].as_str().unwrap_or_default();
            (row["id"].as_u64().unwrap_or(u64::MAX), name.to_owned())
        });
        Ok(rows.collect())
    }

    fn list_rows(&self) -> Result<Vec<Value>> {
        let args = ["queue", "--all", "--service", &self.address];
        let rows = self.world.run_json(&args)?;
        Ok(rows.as_array().context("a list")?.clone())
    }

    pub(super) fn wait_until_over(&self, ids: &[u64]) -> Result<()> {
        for _ in 0..1_200 {
            let rows = self.list_rows()?;
            let is_over = |id: &&u64| {
                let row = rows.iter().find(|row| row["id"].as_u64() == Some(**id));
                row.is_some_and(|row| row["state"] == "complete")
            };
            if ids.iter().filter(is_over).count() == ids.len() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        bail!("workflows have not ended: {:?}", self.list_rows()?)
    }

    /// Waits until workflows have ended, however, but no longer than that.
    pub(super) fn wait_for_ends(&self, ids: &[u64], timeout: Duration) -> Result<()> {
        let watch = Stopwatch::start();
        while watch.elapsed() < timeout {
            let rows = self.list_rows()?;
            let is_over = |id: &&u64| {
                let row = rows.iter().find(|row| row["id"].as_u64() == Some(**id));
                let state = row.and_then(|row| row["state"].as_str());
                state.is_some_and(|state| ["complete", "failed", "removed"].contains(&state))
            };
            if ids.iter().filter(is_over).count() == ids.len() {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// The most memory that the service had.
    pub(super) fn peak_bytes(&self) -> Result<u64> {
        let pid = self.process.as_ref().context("it runs")?.id();
        let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        Ok(kib.context("a peak")?.parse::<u64>()? << 10)
    }

    /// Bytes that home has sent of files.
    pub(super) fn home_bytes(&self) -> Result<u64> {
        let client = BlockingClient::new(&self.world.cluster.identity())?;
        let home = self.world.cluster.home_address();
        let counters = client.block_on(client.client().read_counters(home))?;
        Ok(counters.get("home_read_bytes").copied().unwrap_or(0))
    }
}

impl TestUser {
    /// The directory of the user's identity.
    pub(super) fn identity(&self) -> &Path {
        &self.identity
    }
}

async fn ask_with(
    pool: Pool,
    bearer: Arc<Bearer>,
    call: CallQueue,
    address: String,
    request: Value,
) -> Result<Value> {
    let to_send = call.clone().into();
    let token = bearer.token_for_call(&address, &to_send, time_of_day(), TIMEOUT_MS)?;
    let body = bytes::Bytes::from(serde_json::to_vec(&request)?);
    let deadline = Deadline::after_ms(TIMEOUT_MS);
    let mut tries = 0;
    loop {
        let asked = pool.call_with_body(&address, &token, call.clone(), body.clone(), deadline);
        match asked.await {
            Ok((_, answer)) => return Ok(serde_json::from_slice(&answer)?),
            // The service was killed, perhaps after it had recorded this: the key says so.
            Err(error) if error.is_transient() && tries == 0 => tries += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

fn ask(
    user: &TestUser,
    address: String,
    request: Value,
) -> impl Future<Output = Result<Value>> + use<> {
    let user_name = Some(user.name.clone());
    let call = CallQueue { user: user_name };
    ask_with(
        user.pool.clone(),
        user.bearer.clone(),
        call,
        address,
        request,
    )
}

impl Drop for TestQueue {
    fn drop(&mut self) {
        let _ = self.kill();
        let place = self.state.path().to_string_lossy().into_owned();
        for line in processes_matching(&place) {
            let pid = line.split(' ').next().and_then(|pid| pid.parse().ok());
            pid.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        }
    }
}
