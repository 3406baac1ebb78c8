//! Whole jobs over volumes, in real name spaces. The program is test and job stage at once,
//! because the sandbox starts `/proc/self/exe` anew; so it has its own `main` and one thread.
#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "all of this is test, but clippy looks for `#[test]`"
)]

mod test_server;

use std::fs;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bafs_client::agent::Agent;
use bafs_client::job::{JobEnd, JobIo, StopRequest, run_job};
use bafs_client::sandbox::{
    NotStartedReason, Privilege, Sandbox, dispatch_job_init, enter_private,
};
use bafs_client::signals::StopSignal;
use bafs_client::tree::Durability;
use bafs_proto::ErrorCode;
use bafs_proto::message::{JobCommand, JobLimits, JobOutcome, JobSpec, MountSpec, MountTarget};
use bafs_proto::token::Token;
use libtest_mimic::{Arguments, Trial};
use test_server::{ADDRESS, FakeServer, Fault, VOLUME};
use tokio::sync::watch;

const OP_DEADLINE_MS: u64 = 600;

fn main() -> ExitCode {
    dispatch_job_init();
    let arguments = Arguments::from_args();
    // While there is one thread; the test itself runs in another.
    let entered = if arguments.list {
        None
    } else {
        Some(enter_private())
    };
    let trial = Trial::test("jobs_run_over_volumes", move || {
        match entered.unwrap() {
            Ok(privilege) if fs::File::open("/dev/fuse").is_ok() => run_all(privilege),
            Ok(_) => skip("no /dev/fuse"),
            Err(error) => skip(&error.to_string()),
        }
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![trial]).exit_code()
}

fn run_all(privilege: Privilege) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let sandbox = Sandbox::prepare(privilege).unwrap();
    runtime.block_on(async {
        let store = tempfile::tempdir().unwrap();
        fs::create_dir(store.path().join("in")).unwrap();
        fs::write(store.path().join("in/q"), [b'q'; 5_000]).unwrap();
        let server = FakeServer::new(store.path());
        let pool = server.server(OP_DEADLINE_MS).pool;
        let world = JobFixture {
            server,
            agent: Agent::new(pool, privilege, OP_DEADLINE_MS),
            sandbox,
        };
        world.job_ends_are_distinguished().await;
        world.a_loss_kills_the_job().await;
        world.a_fenced_drain_fails_the_job(privilege).await;
        world.a_request_kills_the_job().await;
        world.a_job_that_is_asked_to_end_has_time_for_it().await;
        let written = fs::read_to_string(store.path().join("asked")).unwrap();
        assert_eq!(written, "saved\n");
        let written = fs::read_to_string(store.path().join("out")).unwrap();
        assert_eq!(written, "from the job /mydata w\n");
    });
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    // Other tests may have mounts of their own on the host.
    let is_ours = |line: &&str| line.starts_with("bafs:work ") || line.starts_with("bafs:db ");
    let left: Vec<_> = mounts.lines().filter(is_ours).collect();
    assert!(left.is_empty(), "mounts are left: {left:?}");
}

fn skip(reason: &str) {
    let line = format!("SKIPPED: jobs: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let mut log = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        log.write_all(line.as_bytes()).unwrap();
    }
}

/// The lifetime of the volume after a job that succeeded, in milliseconds.
const LIFETIME_MS: u64 = 77_000;

struct JobFixture {
    server: Arc<FakeServer>,
    agent: Agent,
    sandbox: Sandbox,
}

impl JobFixture {
    async fn run(
        &self,
        program: &str,
        script: &str,
        request: watch::Receiver<StopRequest>,
    ) -> JobEnd {
        self.run_by(&self.agent, program, script, request).await
    }

    async fn run_by(
        &self,
        agent: &Agent,
        program: &str,
        script: &str,
        request: watch::Receiver<StopRequest>,
    ) -> JobEnd {
        let server = ADDRESS.to_owned();
        let mount = |name: &str, path: &str, target, writable| MountSpec {
            name: name.to_owned(),
            path: path.to_owned(),
            target,
            writable,
            write_back: false,
            token: Token::none(),
            lifetime_ms_min: if writable { LIFETIME_MS } else { 0 },
        };
        let scratch = MountTarget::Scratch {
            server: server.clone(),
            volume: VOLUME,
        };
        let cache = MountTarget::Cache {
            server,
            volume: VOLUME,
        };
        let spec = JobSpec {
            name: "w".to_owned(),
            command: JobCommand {
                executable: program.to_owned(),
                arguments: vec!["-c".to_owned(), script.to_owned()],
                directory: "/mydata".to_owned(),
                ..JobCommand::default()
            },
            mounts: vec![
                mount("work", "/mydata", scratch, true),
                mount("db", "/deep/data", cache, false),
            ],
            op_deadline_ms: OP_DEADLINE_MS,
            limits: JobLimits::default(),
        };
        run_job(agent, &self.sandbox, spec, JobIo::Captured, request).await
    }

    async fn job_ends_are_distinguished(&self) {
        let (_keep, never) = watch::channel(StopRequest::None);
        let script = "cat /deep/data/in/q | wc -c; echo from the job $BAFS_WORK $BAFS_JOB >out";
        let end = self.run("sh", script, never.clone()).await;
        assert_eq!(end.report.outcome, JobOutcome::Exited(0), "{end:?}");
        assert_eq!(end.report.output_tail.trim(), "5000");
        let (work, db) = (&end.report.volumes[0], &end.report.volumes[1]);
        assert_eq!((work.name.as_str(), work.written_bytes), ("work", 23));
        assert_eq!(db.pages[0].page_runs, [(0, 2)]);
        let kept_ms = || self.server.requested_lifetime_ms.swap(0, Ordering::Relaxed);
        assert_eq!(kept_ms(), LIFETIME_MS, "what succeeded leaves results");
        let end = self.run("sh", "exit 3", never.clone()).await;
        assert_eq!(end.report.outcome, JobOutcome::Exited(3));
        assert_eq!(kept_ms(), 0, "what failed leaves none");
        let end = self.run("sh", "kill -6 $$", never.clone()).await;
        assert_eq!(end.report.outcome, JobOutcome::Signaled(6));
        let end = self.run("no-such-program", "", never.clone()).await;
        assert!(
            matches!(end.report.outcome, JobOutcome::NotStarted(_)),
            "{end:?}"
        );
        assert_eq!(end.not_started, Some(NotStartedReason::ExecutableMissing));
        self.server.set_fault(Fault::Refuse(ErrorCode::VolumeLost));
        let end = self.run("sh", "exit 0", never).await;
        self.server.set_fault(Fault::None);
        assert!(has_failed_with(&end, ErrorCode::VolumeLost));
        assert_eq!(end.lost_volume.as_deref(), Some("work"));
    }

    async fn a_loss_kills_the_job(&self) {
        let (_keep, never) = watch::channel(StopRequest::None);
        let server = Arc::clone(&self.server);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.set_fault(Fault::Refuse(ErrorCode::Fenced));
        });
        let start = Instant::now();
        // It ignores errors and signals, and has a child that does not look at the volume.
        let script = "trap '' TERM INT HUP; sleep 60 & while :; do echo x >>lost; sleep 0.1; done";
        let end = self.run("sh", script, never).await;
        self.server.set_fault(Fault::None);
        assert!(
            start.elapsed() < Duration::from_secs(4),
            "{:?}",
            start.elapsed()
        );
        assert!(has_failed_with(&end, ErrorCode::Fenced), "{end:?}");
        assert_eq!(end.lost_volume.as_deref(), Some("work"));
    }

    /// The next writer takes the volume while changes that were answered are on their way.
    async fn a_fenced_drain_fails_the_job(&self, privilege: Privilege) {
        let (_keep, never) = watch::channel(StopRequest::None);
        let pool = self.server.server(OP_DEADLINE_MS).pool;
        let mut agent = Agent::new(pool, privilege, OP_DEADLINE_MS);
        agent.options.durability = Some(Durability::OnSync);
        let server = Arc::clone(&self.server);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            server.set_fault(Fault::RefuseLate(ErrorCode::Fenced, 500));
        });
        let script = "exec 3>late; echo one >&3; sleep 1; echo two >&3";
        let end = self.run_by(&agent, "sh", script, never).await;
        self.server.set_fault(Fault::None);
        assert!(end.report.wall_ms > 0, "it ended by itself: {end:?}");
        assert!(has_failed_with(&end, ErrorCode::Fenced), "{end:?}");
        assert_eq!(end.lost_volume.as_deref(), Some("work"));
    }

    async fn a_request_kills_the_job(&self) {
        let (kill, killed) = watch::channel(StopRequest::None);
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            kill.send_replace(StopRequest::Kill(StopSignal::Terminate));
        });
        let end = self.run("sh", "echo begun; sleep 60", killed).await;
        assert_eq!(end.report.outcome, JobOutcome::Killed);
        assert_eq!(end.report.output_tail, "begun\n");
    }

    /// Runs a script, and sends these wishes one after the other once it has said that it runs.
    async fn run_with_requests(&self, script: &str, requests: Vec<StopRequest>) -> JobEnd {
        let (stop_request, wished) = watch::channel(StopRequest::None);
        tokio::spawn(async move {
            for next in requests {
                tokio::time::sleep(Duration::from_millis(400)).await;
                stop_request.send_replace(next);
            }
            stop_request.closed().await;
        });
        self.run("sh", script, wished).await
    }

    async fn a_job_that_is_asked_to_end_has_time_for_it(&self) {
        let end = StopRequest::Terminate(StopSignal::Terminate);
        let saving = "trap 'sleep 0.2; echo saved >asked; exit 4' TERM; \
            while :; do sleep 0.05; done";
        let ended = self.run_with_requests(saving, vec![end]).await;
        assert_eq!(ended.report.outcome, JobOutcome::Exited(4), "{ended:?}");
        let ended = self.run_with_requests("sleep 60", vec![end]).await;
        assert_eq!(ended.report.outcome, JobOutcome::Signaled(15), "{ended:?}");
        // Who does not want to wait any longer asks again.
        let deaf = "trap '' TERM; while :; do sleep 0.05; done";
        let requests = vec![end, StopRequest::Kill(StopSignal::Terminate)];
        let ended = self.run_with_requests(deaf, requests).await;
        assert_eq!(ended.report.outcome, JobOutcome::Killed, "{ended:?}");
    }
}

fn has_failed_with(end: &JobEnd, code: ErrorCode) -> bool {
    matches!(&end.report.outcome, JobOutcome::EnvironmentFailed(error) if error.code == code)
}
