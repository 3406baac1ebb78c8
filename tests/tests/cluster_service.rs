//! `bafs scheduler` on real processes: several users, kills, quotas, what was learned.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// A service, and all that a test needs to use it.
pub(crate) struct TestService {
    pub(crate) world: TestCluster,
    pub(crate) state: TempDir,
    pub(crate) process: Option<Child>,
    pub(crate) address: String,
    options: Vec<String>,
    variables: Vec<(OsString, OsString)>,
    /// Words for `mount`, where the state has a disk of its own.
    disk: Option<&'static str>,
}

impl TestService {
    fn start(nodes: &[&str], options: &[&str]) -> Result<Self> {
        Self::start_on_disk(nodes, options, None)
    }

    /// Starts one whose state is on a private disk, which ends with it (needs root).
    pub(crate) fn start_on_disk(
        nodes: &[&str],
        options: &[&str],
        disk: Option<&'static str>,
    ) -> Result<Self> {
        let world = TestCluster::start(nodes)?;
        world.wait_for_servers(nodes.len() + 1)?;
        let options = options.iter().map(|it| (*it).to_owned()).collect();
        let mut service = Self {
            world,
            state: tempfile::tempdir()?,
            process: None,
            address: String::new(),
            options,
            variables: Vec::new(),
            disk,
        };
        service.start_process()?;
        Ok(service)
    }

    fn start_process(&mut self) -> Result<()> {
        let state = self.state.path().join("state");
        let mut command = self.world.bafs_command(&["scheduler", "--json", "--state"]);
        command.arg(state).args(&self.options);
        command.envs(self.variables.iter().cloned());
        if let Some(disk) = self.disk {
            command = self.on_disk(disk, &command);
        }
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().context("it has an output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        self.process = Some(child);
        let line: Value = serde_json::from_str(&line).context("it says where it listens")?;
        self.address = line["listening"].as_str().context("an address")?.to_owned();
        Ok(())
    }

    /// The same command with a disk for the state.
    fn on_disk(&self, disk: &str, command: &Command) -> Command {
        let state = self.state.path().display();
        let script = format!("mount {disk} {state} && exec \"$0\" \"$@\"");
        let mut mounted = Command::new("unshare");
        mounted
            .args(["-m", "sh", "-c", &script])
            .arg(command.get_program())
            .args(command.get_args());
        let variables = command.get_envs();
        mounted.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        mounted
    }

    pub(crate) fn end_process(&mut self, signal: Signal) -> Result<()> {
        let Some(mut child) = self.process.take() else {
            return Ok(());
        };
        kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        child.wait()?;
        Ok(())
    }

    pub(crate) fn add_user(&self, name: &str, options: &[&str]) -> Result<PathBuf> {
        let to = self.state.path().join(format!("{name}-{}", options.len()));
        let mut command = self.world.bafs_command(&["user", "add", name, "--service"]);
        command
            .arg(&self.address)
            .arg("--to")
            .arg(&to)
            .args(options);
        let output = command.output()?;
        ensure!(output.status.success(), printed_text(&output));
        Ok(to)
    }

    fn command(&self, identity: &Path, args: &[&str]) -> Command {
        let mut command = self.world.bafs_command(args);
        command.arg("--identity").arg(identity);
        command.env_remove("BAFS_CATALOG");
        command
    }

    pub(crate) fn code(&self, identity: &Path, args: &[&str]) -> Result<Option<i32>> {
        let output = self.command(identity, args).output()?;
        Ok(output.status.code())
    }

    pub(crate) fn json(&self, identity: &Path, args: &[&str]) -> Result<Value> {
        let output = self.command(identity, args).arg("--json").output()?;
        ensure!(output.status.success(), printed_text(&output));
        serde_json::from_slice(&output.stdout).with_context(|| printed_text(&output))
    }

    pub(crate) fn submit(&self, identity: &Path, workflow: &Path) -> Result<u64> {
        let answer = self.json(identity, &["submit", &workflow.to_string_lossy()])?;
        answer["workflow"].as_u64().context("a number")
    }

    pub(crate) fn states(&self, identity: &Path) -> Result<Vec<(u64, String)>> {
        let rows = self.json(identity, &["queue", "--all"])?;
        let rows = rows.as_array().context("a list")?.iter();
        let rows = rows.map(|row| {
            let state = row["state"].as_str().unwrap_or_default();
            (row["id"].as_u64().unwrap_or(u64::MAX), state.to_owned())
        });
        Ok(rows.collect())
    }

    pub(crate) fn wait_for_state(&self, identity: &Path, id: u64, state: &str) -> Result<()> {
        let mut found = Vec::new();
        for _ in 0..600 {
            found = self.states(identity)?;
            if found.contains(&(id, state.to_owned())) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let rows = self.json(identity, &["queue", "--all"])?;
        bail!("workflow {id} is not {state}: {found:?}: {rows}")
    }

    fn run_directory(&self, id: u64) -> PathBuf {
        self.state.path().join(format!("state/workflows/{id}"))
    }
}

impl Drop for TestService {
    fn drop(&mut self) {
        let _ = self.end_process(Signal::SIGKILL);
        // Runs outlive the service; they end with their test.
        let place = self.state.path().to_string_lossy().into_owned();
        for line in bafs_tests::processes_matching(&place) {
            let pid = line.split(' ').next().and_then(|pid| pid.parse().ok());
            pid.map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
        }
    }
}

/// A workflow of some jobs, each of which says so on the host when it starts.
pub(crate) fn write_workflow(
    service: &TestService,
    name: &str,
    jobs: u32,
    seconds: &str,
) -> Result<PathBuf> {
    let log = service.world.home.path().join("log");
    let text = format!(
        "for i in 1..{jobs}\n\
         volume x$(i) scratch 1 MB\n\
         job a$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"echo {name}-$(i) >> {log}; sleep {seconds}; echo $(i) > /x/out\"\n\
         }}\n\
         mount x$(i) a$(i) /x\n\
         extract x$(i) out bafs://home/{name}/$(i)\n\
         end\n",
        log = log.display(),
    );
    let path = service.world.home.path().join(format!("{name}.bafs"));
    std::fs::write(&path, text)?;
    Ok(path)
}

fn read_log(service: &TestService) -> Vec<String> {
    let log = service.world.read_home("log").unwrap_or_default();
    let log = String::from_utf8_lossy(&log).into_owned();
    log.lines().map(str::to_owned).collect()
}

pub(crate) fn start_service(
    test: &str,
    nodes: &[&str],
    options: &[&str],
) -> Result<Option<TestService>> {
    match mount_obstacle() {
        Some(reason) => {
            report_skip(test, &reason);
            Ok(None)
        }
        None => TestService::start(nodes, options).map(Some),
    }
}

#[test]
fn service_keeps_users_apart() -> Result<()> {
    let test = "cluster_service::service_keeps_users_apart";
    let Some(mut service) = start_service(test, &["100MB", "100MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &["--home", "alice"])?;
    let bob = service.add_user("bob", &["--list-others", "--space", "5MB"])?;
    let carol = service.add_user("carol", &["--home=", "--slots=1", "--space=9MB"])?;
    let (own, foreign) = (
        write_workflow(&service, "alice", 3, "0.1")?,
        write_workflow(&service, "bob", 2, "0.1")?,
    );
    let first = service.submit(&alice, &own)?;
    service.wait_for_state(&alice, first, "complete")?;
    assert_eq!(service.world.read_home("alice/3")?, b"3\n");
    let second = service.submit(&bob, &foreign)?;
    service.wait_for_state(&bob, second, "complete")?;
    assert_eq!(service.states(&alice)?.len(), 1, "alice sees hers only");
    assert_eq!(service.states(&carol)?.len(), 0);
    let seen = service.json(&bob, &["queue", "--all"])?;
    assert_eq!(
        seen[0]["details"],
        Value::Null,
        "no details of others: {seen}"
    );
    assert_eq!(seen[0]["user"], Value::Null);
    assert_eq!(seen[1]["user"], "bob");
    let (own, foreign) = (own.to_string_lossy(), foreign.to_string_lossy());
    for (who, args, code) in [
        (&alice, vec!["submit", &*foreign], 3),
        (&alice, vec!["remove", "77"], 4),
        (&carol, vec!["remove", "0"], 4),
        (&bob, vec!["remove", "0"], 3),
        (&alice, vec!["release", "0"], 5),
        (&alice, vec!["user", "list"], 3),
        (&alice, vec!["submit", "nowhere.bafs"], 1),
        (&alice, vec!["submit", &*own, "--user", "bob"], 3),
    ] {
        assert_eq!(service.code(who, &args)?, Some(code), "{args:?}");
    }
    let large = "volume v scratch 50 MB\njob a {\nexecutable = /bin/true\n}\nmount v a /v\n";
    let large_path = service.world.home.path().join("large.bafs");
    std::fs::write(&large_path, large)?;
    let large = large_path.to_string_lossy();
    assert_eq!(
        service.code(&bob, &["submit", &large])?,
        Some(6),
        "above the quota"
    );
    check_rights_of_runs(&service)?;
    check_removed_user(&mut service, &alice)
}

fn check_rights_of_runs(service: &TestService) -> Result<()> {
    // The identity of her runs has her rights only, whatever the service checks before.
    let narrow = service.state.path().join("state/users/alice-1");
    let stranger = write_workflow(service, "stranger", 1, "0.1")?;
    let mut run = service
        .world
        .bafs_command(&["run", "--resource-timeout", "5s"]);
    let output = run.arg(&stranger).env("BAFS_IDENTITY", narrow).output()?;
    assert_eq!(output.status.code(), Some(1), "{}", printed_text(&output));
    assert!(service.world.read_home("stranger/1").is_err());
    Ok(())
}

/// The body of what a page answers.
fn get_page(url: &str, (cookie, token): (&str, &str)) -> Result<String> {
    let rest = url.strip_prefix("http://").context("a link")?;
    let (address, path) = rest.split_once('/').context("a path")?;
    let mut stream = std::net::TcpStream::connect(address)?;
    write!(
        stream,
        "GET /{path} HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\nx-bafs-token: {token}\r\n\
         Connection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// What a browser has of a page.
struct PageSession {
    link: String,
    cookie: String,
    token: String,
}

fn open_page(service: &TestService, identity: &Path) -> Result<PageSession> {
    let opened = service.json(identity, &["queue", "--page"])?;
    let link = opened["page"].as_str().context("a link")?;
    let answer = get_page(link, ("", ""))?;
    let mut lines = answer.lines();
    let cookie = lines.find_map(|line| line.strip_prefix("set-cookie: "));
    let cookie = cookie.and_then(|it| it.split(';').next());
    let token = answer.split("#token=").nth(1);
    let token = token.and_then(|rest| rest.split('"').next());
    Ok(PageSession {
        link: link.to_owned(),
        cookie: cookie.with_context(|| answer.clone())?.to_owned(),
        token: token.with_context(|| answer.clone())?.to_owned(),
    })
}

#[test]
fn service_page_shows_a_user_her_workflows_only() -> Result<()> {
    let test = "cluster_service::service_page_shows_a_user_her_workflows_only";
    let Some(service) = start_service(test, &["200MB"], &["--page"])? else {
        return Ok(());
    };
    let (alice, bob) = (
        service.add_user("alice", &["--home", "alice"])?,
        service.add_user("bob", &["--home", "bob"])?,
    );
    let path = write_workflow(&service, "alice", 1, "0")?;
    let id = service.submit(&alice, &path)?;
    service.wait_for_state(&alice, id, "complete")?;
    let base = |link: &str| link.split("/login").next().unwrap_or_default().to_owned();
    let read = |session: &PageSession| {
        let url = format!("{}/api/v1/workflows", base(&session.link));
        get_page(&url, (&session.cookie, &session.token))
    };
    let (hers, his) = (open_page(&service, &alice)?, open_page(&service, &bob)?);
    let again = get_page(&hers.link, ("", ""))?;
    ensure!(
        !again.contains("set-cookie"),
        "the link opens once: {again}"
    );
    let her_session = hers;
    let (hers, his) = (read(&her_session)?, read(&his)?);
    ensure!(hers.contains("\"user\":\"alice\""), "{hers}");
    ensure!(his.contains("200") && !his.contains("alice"), "{his}");
    // What the replaced identity opened ends with it, though the name stays.
    service.add_user("alice", &["--home=alice"])?;
    let refused = read(&her_session)?;
    ensure!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    Ok(())
}

fn check_removed_user(service: &mut TestService, alice: &Path) -> Result<()> {
    let admin = service.world.cluster.identity();
    let address = service.address.clone();
    let args = ["user", "remove", "alice", "--service", &address];
    assert_eq!(service.code(&admin, &args)?, Some(0));
    assert_eq!(service.code(alice, &["queue"])?, Some(3), "she was removed");
    let again = service.add_user("alice", &["--home=alice", "--days=9", "--slots=2"])?;
    assert_eq!(
        service.code(alice, &["queue"])?,
        Some(3),
        "an older identity"
    );
    assert_eq!(service.code(&again, &["queue"])?, Some(0));
    service.end_process(Signal::SIGTERM)?;
    assert_eq!(service.code(&again, &["queue"])?, Some(75), "it is away");
    Ok(())
}

#[test]
fn killed_service_loses_and_doubles_nothing() -> Result<()> {
    let test = "cluster_service::killed_service_loses_and_doubles_nothing";
    let options = ["--runs", "2"];
    let Some(mut service) = start_service(test, &["100MB", "100MB"], &options)? else {
        return Ok(());
    };
    let users = [
        service.add_user("alice", &[])?,
        service.add_user("bob", &[])?,
    ];
    let mut submitted = Vec::new();
    for number in 0..6usize {
        let name = format!("w{number}");
        let workflow = write_workflow(&service, &name, 4, "0.4")?;
        let user = &users[number % 2];
        submitted.push((user.clone(), service.submit(user, &workflow)?));
        if number % 2 == 1 {
            std::thread::sleep(Duration::from_millis(300 * number as u64));
            let address = service.address.clone();
            service.end_process(Signal::SIGKILL)?;
            service.start_process()?;
            assert_eq!(service.address, address, "users find it again");
        }
    }
    for (user, id) in &submitted {
        service.wait_for_state(user, *id, "complete")?;
    }
    let mut log = read_log(&service);
    log.sort_unstable();
    let jobs = (0..6).flat_map(|w| (1..=4).map(move |job| format!("w{w}-{job}")));
    assert_eq!(log, jobs.collect::<Vec<_>>(), "each job ran once");
    Ok(())
}

#[test]
fn held_run_starts_no_further_job_until_released() -> Result<()> {
    let test = "cluster_service::held_run_starts_no_further_job_until_released";
    let Some(service) = start_service(test, &["100MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &[])?;
    let workflow = write_workflow(&service, "w", 30, "0.5")?;
    let id = service.submit(&alice, &workflow)?;
    let number = id.to_string();
    wait_for_jobs(&service, 2)?;
    assert_eq!(service.code(&alice, &["hold", &number])?, Some(0));
    // The run reads its share each second, and asks nodes within four.
    std::thread::sleep(Duration::from_secs(7));
    let then = read_log(&service).len();
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(read_log(&service).len(), then, "no job starts");
    assert!(then < 30);
    assert_eq!(service.code(&alice, &["release", &number])?, Some(0));
    wait_for_jobs(&service, then + 2)?;
    assert_eq!(service.code(&alice, &["remove", &number])?, Some(0));
    service.wait_for_state(&alice, id, "removed")?;
    assert!(
        !service
            .run_directory(id)
            .join("w.bafs.journal.lock")
            .exists()
    );
    let jobs = read_log(&service).len();
    assert!(jobs < 30, "it was cancelled: {jobs} jobs");
    Ok(())
}

fn wait_for_jobs(service: &TestService, count: usize) -> Result<()> {
    for _ in 0..400 {
        if read_log(service).len() >= count {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("{} jobs have started", read_log(service).len())
}

#[test]
fn quota_of_slots_limits_the_run() -> Result<()> {
    let test = "cluster_service::quota_of_slots_limits_the_run";
    let Some(service) = start_service(test, &["100MB", "100MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &["--slots", "1"])?;
    let log = service.world.home.path().join("log");
    let text = format!(
        "for i in 1..6\nvolume x$(i) scratch 1 MB\njob a$(i) {{\nexecutable = /bin/sh\n\
         arguments = -c \"echo + >> {log}; sleep 0.3; echo - >> {log}\"\n}}\n\
         mount x$(i) a$(i) /x\nend\n",
        log = log.display()
    );
    let path = service.world.write_workflow(&text)?;
    let id = service.submit(&alice, &path)?;
    service.wait_for_state(&alice, id, "complete")?;
    let (mut running, mut most) = (0, 0);
    for line in read_log(&service) {
        running += if line == "+" { 1 } else { -1 };
        most = most.max(running);
    }
    assert_eq!(most, 1, "four slots are free, and one is hers");
    let users = service
        .world
        .run_json(&["user", "list", "--service", &service.address])?;
    let slot_ms = users[0]["usage"]["slot_ms"].as_u64().context("a number")?;
    assert!((1_000..60_000).contains(&slot_ms), "{slot_ms}");
    Ok(())
}

#[test]
fn second_run_plans_with_learned_values() -> Result<()> {
    let test = "cluster_service::second_run_plans_with_learned_values";
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let nodes = ["200MB", "200MB"];
    let world = TestCluster::start_with_home_rate(&nodes, Some("10MB/s"))?;
    world.wait_for_servers(3)?;
    world.write_home("data/in", &vec![7; 4_000_000])?;
    let text = "volume in cache bafs://home/data 5 MB\n\
        for i in 1..3\nvolume x$(i) scratch 10 MB\njob a$(i) {\nexecutable = /bin/sh\n\
        arguments = -c \"cp /in/in /x/out; sleep 0.2\"\n}\nmount in a$(i) /in\n\
        mount x$(i) a$(i) /x\nextract x$(i) out bafs://home/out$(i)\nend\n";
    let path = world.write_workflow(text)?;
    let path = path.to_string_lossy();
    let learned = tempfile::tempdir()?;
    let file = learned.path().join("learned.redb");
    let bafs = |args: &[&str]| {
        let output = world
            .bafs_command(args)
            .env("BAFS_LEARNED", &file)
            .output()?;
        ensure!(output.status.success(), printed_text(&output));
        Ok(printed_text(&output))
    };
    let planned = "planned with what earlier runs have taught";
    let first = bafs(&["run", &path])?;
    assert!(!first.contains(planned), "{first}");
    let list = bafs(&["learned", "list"])?;
    assert!(list.contains("/bin/sh a#: computes"), "{list}");
    assert!(list.contains("node n"), "{list}");
    let second = bafs(&["run", &path, "--forced"])?;
    assert!(second.contains(planned), "{second}\n{list}");
    let plan = bafs(&["plan", &path])?;
    assert!(plan.contains("choice:"), "{plan}");
    bafs(&["learned", "forget", "--all"])?;
    assert!(bafs(&["learned", "list"])?.contains("nothing is learned yet"));
    let third = bafs(&["run", &path, "--forced"])?;
    assert!(!third.contains(planned), "{third}");
    Ok(())
}

/// What the owner of the service sets for own commands is not for the workflows of users.
#[test]
fn configuration_of_the_service_reaches_no_run() -> Result<()> {
    let test = "cluster_service::configuration_of_the_service_reaches_no_run";
    let Some(mut service) = start_service(test, &["200MB"], &[])? else {
        return Ok(());
    };
    let alice = service.add_user("alice", &["--home", "alice"])?;
    let file = service.state.path().join("bafs.toml");
    std::fs::write(&file, "")?;
    service.end_process(Signal::SIGTERM)?;
    service.variables = vec![("BAFS_CONFIG".into(), file.clone().into())];
    service.start_process()?;
    std::fs::write(&file, "[command.run]\nlocal = 2\nunknown = 3\n")?;
    let path = write_workflow(&service, "alice", 1, "0")?;
    let id = service.submit(&alice, &path)?;
    service.wait_for_state(&alice, id, "complete")
}
