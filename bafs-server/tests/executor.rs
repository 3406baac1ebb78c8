//! The executor with real agent processes: small shell scripts that play the agent.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::ids::{ExecutionId, VolumeId};
use bafs_proto::message::{
    JobCommand, JobLimits, JobOutcome, JobReport, JobSpec, JobState, KillJob, MountSpec,
    MountTarget, ReadJobOutput, StartJob, WatchJobs,
};
use bafs_proto::time::Deadline;
use bafs_server::counters::Counters;
use bafs_server::departure::Departure;
use bafs_server::executor::{Executor, ExecutorConfig, TemporaryQuota};

const GRACE: Duration = Duration::from_secs(25);

/// An executor with two slots whose agent is this script.
fn executor(directory: &Path, script: &str) -> Arc<Executor> {
    leaving_executor(directory, script, Departure::new(None, GRACE))
}

/// The same on a node that leaves then.
fn leaving_executor(directory: &Path, script: &str, departure: Departure) -> Arc<Executor> {
    let program = directory.join("agent.sh");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("script");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("chmod");
    let config = ExecutorConfig {
        copies_agents: false,
        slots: 2,
        program,
        identity: "/some/identity".into(),
        memory_bytes: None,
        log_directory: directory.to_owned(),
        started_file: directory.join("starts"),
        volume_directory: directory.to_owned(),
        temporary_directory: directory.join("temporary"),
        temporary_quota: TemporaryQuota {
            bytes: 1 << 20,
            files: 100,
            memory_bytes: 1 << 20,
        },
        departure,
    };
    Executor::open(config, Counters::default()).expect("executor")
}

fn report(outcome: JobOutcome) -> String {
    let report = JobReport {
        outcome,
        wall_ms: 5,
        cpu_ms: 4,
        memory_bytes_max: 0,
        output_tail: "said".to_owned(),
        volumes: Vec::new(),
    };
    serde_json::to_string(&report).expect("json")
}

fn start_call(id: u128) -> StartJob {
    let (name, command) = (format!("job {id}"), JobCommand::default());
    let job = JobSpec {
        name,
        command,
        mounts: Vec::new(),
        op_deadline_ms: 1_000,
        limits: JobLimits::default(),
    };
    StartJob {
        execution: ExecutionId(id),
        job,
    }
}

/// The same with a volume, and a capability of its own for it.
fn start_call_with_token(id: u128, token: u8) -> StartJob {
    let mut call = start_call(id);
    call.job.mounts.push(MountSpec {
        name: "v".to_owned(),
        path: "/v".to_owned(),
        target: MountTarget::Scratch {
            server: "h:1".to_owned(),
            volume: VolumeId(1),
        },
        writable: true,
        write_back: false,
        token: serde_json::from_value(serde_json::json!([token])).expect("token"),
        lifetime_ms_min: 0,
    });
    call
}

async fn state(executor: &Executor, id: u128, wait_ms: u32) -> Option<JobState> {
    let call = WatchJobs {
        executions: vec![ExecutionId(id)],
        wait_ms,
    };
    let reports = executor
        .watch(call, Deadline::after_ms(20_000))
        .await
        .expect("watch");
    assert_eq!(reports.reports.len(), 1);
    reports.reports.into_iter().next().expect("one")
}

async fn outcome(executor: &Executor, id: u128) -> JobOutcome {
    match state(executor, id, 15_000).await {
        Some(JobState::Ended(report)) => report.outcome,
        other => panic!("not ended: {other:?}"),
    }
}

/// A batch system signals the job first and the node a moment later.
#[tokio::test]
async fn ending_node_explains_the_end_of_jobs() {
    let directory = tempfile::tempdir().expect("directory");
    let departure = Departure::new(None, GRACE);
    let line = report(JobOutcome::Signaled(15));
    let script = format!("read line; echo '{line}'");
    let executor = leaving_executor(directory.path(), &script, departure.clone());
    executor.start(start_call(1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Signaled(15));
    executor.start(start_call(2)).expect("start");
    departure.begin_end();
    match outcome(&executor, 2).await {
        JobOutcome::EnvironmentFailed(error) => assert_eq!(error.code, ErrorCode::NodeLeaving),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn success_on_an_ending_node_counts() {
    let directory = tempfile::tempdir().expect("directory");
    let departure = Departure::new(None, GRACE);
    departure.begin_end();
    let line = report(JobOutcome::Exited(0));
    let executor = leaving_executor(
        directory.path(),
        &format!("read line; echo '{line}'"),
        departure,
    );
    executor.start(start_call(1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Exited(0));
}

#[tokio::test]
async fn an_agent_runs_once_and_its_report_stays() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Exited(3));
    let script = format!(
        "read line; echo \"$line\" >> {0}/got; echo \"$@\" >> {0}/got; echo words >&2; \
         echo '{line}'",
        directory.path().display()
    );
    let executor = executor(directory.path(), &script);
    executor.start(start_call_with_token(1, 1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Exited(3));
    for _ in 0..3 {
        executor.start(start_call_with_token(1, 1)).expect("again");
    }
    // A scheduler that was started anew has other capabilities for the same job.
    executor
        .start(start_call_with_token(1, 2))
        .expect("with another token");
    let other = StartJob {
        execution: ExecutionId(1),
        ..start_call(2)
    };
    assert_eq!(
        executor.start(other).expect_err("other").code,
        ErrorCode::Conflict
    );
    assert_eq!(executor.running_jobs(), 0);
    let got = std::fs::read_to_string(directory.path().join("got")).expect("got");
    let lines: Vec<_> = got.lines().collect();
    assert_eq!(lines.len(), 2, "it ran once: {got}");
    assert_eq!(
        serde_json::from_str::<JobSpec>(lines[0]).expect("job"),
        start_call_with_token(1, 1).job
    );
    let printed = directory.path().join(ExecutionId(1).to_string());
    let printed = format!(" --output-prefix {}", printed.display());
    assert!(lines[1].starts_with("agent --identity /some/identity "));
    assert!(lines[1].ends_with(&printed), "{}", lines[1]);
    let log = directory.path().join(format!("{}.log", ExecutionId(1)));
    assert_eq!(std::fs::read_to_string(log).expect("log"), "words\n");
    assert_eq!(state(&executor, 9, 0).await, None);
}

#[tokio::test]
async fn a_missing_report_is_an_environment_failure() {
    let scripts = [
        "exit 7",
        "kill -9 $$",
        "read line; echo nonsense",
        "read line; sleep 60 & exit 0",
    ];
    for script in scripts {
        let directory = tempfile::tempdir().expect("directory");
        let executor = executor(directory.path(), script);
        executor.start(start_call(1)).expect("start");
        let JobOutcome::EnvironmentFailed(error) = outcome(&executor, 1).await else {
            panic!("{script}");
        };
        assert_eq!(error.code, ErrorCode::ServerFault, "{script}");
        assert!(
            error.detail.contains("died") && error.detail.contains("job 1"),
            "{error}"
        );
    }
    let directory = tempfile::tempdir().expect("directory");
    let executor = executor(directory.path(), "exit 0");
    std::fs::remove_file(directory.path().join("agent.sh")).expect("remove");
    executor.start(start_call(1)).expect("start");
    let JobOutcome::EnvironmentFailed(error) = outcome(&executor, 1).await else {
        panic!("no program")
    };
    assert!(
        error.detail.contains("cannot start the agent program"),
        "{error}"
    );
}

#[tokio::test]
async fn a_kill_ends_even_unresponsive_agents() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Killed);
    // `cat` ends with the input: a well-behaved agent.
    let polite = executor(directory.path(), &format!("cat > /dev/null; echo '{line}'"));
    polite.start(start_call(1)).expect("start");
    assert_eq!(state(&polite, 1, 100).await, Some(JobState::Running));
    polite.kill(KillJob {
        execution: ExecutionId(1),
    });
    let Some(JobState::Ended(report)) = state(&polite, 1, 15_000).await else {
        panic!("running")
    };
    assert_eq!((report.outcome, report.wall_ms), (JobOutcome::Killed, 5));

    let directory = tempfile::tempdir().expect("directory");
    let pid = directory.path().join("pid");
    let script = format!(
        "echo $$ > {}; while true; do sleep 0.1; done",
        pid.display()
    );
    let deaf = executor(directory.path(), &script);
    deaf.start(start_call(1)).expect("start");
    while !std::fs::read_to_string(&pid).is_ok_and(|text| text.ends_with('\n')) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..2 {
        deaf.kill(KillJob {
            execution: ExecutionId(1),
        });
    }
    assert_eq!(outcome(&deaf, 1).await, JobOutcome::Killed);
    assert!(!is_alive(&pid), "the agent must be gone");
    deaf.kill(KillJob {
        execution: ExecutionId(2),
    });
    deaf.start(start_call(2)).expect("start");
    assert_eq!(
        outcome(&deaf, 2).await,
        JobOutcome::Killed,
        "a kill is final even before the start"
    );
}

fn is_alive(pid: &Path) -> bool {
    let pid = std::fs::read_to_string(pid).expect("pid");
    Path::new("/proc")
        .join(pid.trim())
        .join("exe")
        .read_link()
        .is_ok()
}

#[tokio::test]
async fn surplus_jobs_are_refused_and_stopping_kills_all() {
    let directory = tempfile::tempdir().expect("directory");
    let pid = directory.path().join("pid");
    let script = format!("echo $$ > {}; exec sleep 600", pid.display());
    let executor = executor(directory.path(), &script);
    for id in 0..8 {
        executor.start(start_call(id)).expect("start");
    }
    assert_eq!(
        executor.start(start_call(8)).expect_err("full").code,
        ErrorCode::Busy
    );
    assert_eq!(executor.running_jobs(), 8);
    let watched = WatchJobs {
        executions: (0..8).map(ExecutionId).collect(),
        wait_ms: 600_000,
    };
    let watching = executor.clone();
    let watch =
        tokio::spawn(async move { watching.watch(watched, Deadline::after_ms(20_000)).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    executor.kill(KillJob {
        execution: ExecutionId(3),
    });
    let reports = watch.await.expect("task").expect("watch").reports;
    let ended: Vec<_> = reports
        .iter()
        .map(|state| matches!(state, Some(JobState::Ended(_))))
        .collect();
    assert_eq!(ended.iter().filter(|ended| **ended).count(), 1);
    assert!(ended[3]);
    while !pid.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    executor.stop();
    for _ in 0..200 {
        if !is_alive(&pid) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!is_alive(&pid));
    assert_eq!(
        executor.start(start_call(20)).expect_err("stopped").code,
        ErrorCode::Busy
    );
}

#[tokio::test]
async fn agent_output_neither_blocks_nor_fills_the_disk() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Exited(0));
    let script = format!("read line; head -c 5000000 /dev/zero >&2; echo '{line}'");
    let executor = executor(directory.path(), &script);
    executor.start(start_call(1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Exited(0));
    tokio::time::sleep(Duration::from_millis(300)).await;
    let sizes = std::fs::read_dir(directory.path()).expect("list");
    let kept: u64 = sizes
        .map(|entry| entry.expect("entry").metadata().expect("stat").len())
        .sum();
    assert!(kept <= (1 << 20) + 4096, "{kept}");
}

#[tokio::test]
async fn a_restarted_node_reruns_no_earlier_execution() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Exited(0));
    let script = format!(
        "read line; echo ran >> {0}/ran; echo '{line}'",
        directory.path().display()
    );
    let before = executor(directory.path(), &script);
    before.start(start_call(1)).expect("start");
    assert_eq!(outcome(&before, 1).await, JobOutcome::Exited(0));
    before.kill(KillJob {
        execution: ExecutionId(2),
    });
    drop(before);
    // Its answer was lost, so whoever asked asks again, now the next life of the node.
    let after = executor(directory.path(), &script);
    for id in [1, 2] {
        let refused = after
            .start(start_call(id))
            .expect_err("what it left is unknown");
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        assert!(!refused.is_transient(), "asking again would not help");
        assert_eq!(state(&after, id, 0).await, None);
    }
    after.start(start_call(3)).expect("start");
    assert_eq!(outcome(&after, 3).await, JobOutcome::Exited(0));
    let ran = std::fs::read_to_string(directory.path().join("ran")).expect("ran");
    assert_eq!(ran.lines().count(), 2, "each once");
}

#[tokio::test]
async fn job_output_is_available_after_its_end() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Exited(1));
    // It is given the beginning of the files' names last.
    let script = format!(
        "read line; for printed; do :; done; echo out > $printed.out; echo why > $printed.err; \
         echo '{line}'"
    );
    let executor = executor(directory.path(), &script);
    let ask = |id| {
        executor.read_output(ReadJobOutput {
            execution: ExecutionId(id),
        })
    };
    let unknown = ask(1).await.expect_err("it is not known");
    assert_eq!(unknown.code, ErrorCode::NotFound);
    executor.start(start_call(1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Exited(1));
    let (told, body) = ask(1).await.expect("it has ended");
    assert_eq!((told.stdout_bytes, &body[..]), (4, &b"out\nwhy\n"[..]));
}

#[tokio::test]
async fn silent_job_has_an_empty_output() {
    let directory = tempfile::tempdir().expect("directory");
    let line = report(JobOutcome::Exited(0));
    let executor = executor(directory.path(), &format!("read line; echo '{line}'"));
    executor.start(start_call(1)).expect("start");
    assert_eq!(outcome(&executor, 1).await, JobOutcome::Exited(0));
    let call = ReadJobOutput {
        execution: ExecutionId(1),
    };
    let (told, body) = executor.read_output(call).await.expect("it has ended");
    assert_eq!((told.stdout_bytes, body.len()), (0, 0));
}
