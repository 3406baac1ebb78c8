//! Cases: process ids, temporary files and mount points that jobs of one machine do not share.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::thread;

use bafs_client::sandbox::SandboxOutcome;

use crate::Case;
use crate::sandbox_fixture::{AgentUser, SandboxFixture};

pub(crate) const CASES: &[Case] = &[
    (
        "concurrent_jobs_have_distant_process_ids",
        concurrent_jobs_have_distant_process_ids,
    ),
    (
        "private_tmp_is_empty_at_start",
        private_tmp_is_empty_at_start,
    ),
    (
        "shared_memory_is_private_and_bounded",
        shared_memory_is_private_and_bounded,
    ),
    ("named_paths_are_the_hosts", named_paths_are_the_hosts),
    (
        "named_files_of_tmp_can_be_replaced",
        named_files_of_tmp_can_be_replaced,
    ),
    ("shared_tmp_is_the_hosts", shared_tmp_is_the_hosts),
    (
        "mount_points_leave_their_parent_writable",
        mount_points_leave_their_parent_writable,
    ),
    (
        "mount_points_below_named_paths_work",
        mount_points_below_named_paths_work,
    ),
    (
        "killed_jobs_leave_no_mount_point",
        killed_jobs_leave_no_mount_point,
    ),
    (
        "a_volume_over_var_tmp_causes_a_warning",
        a_volume_over_var_tmp_causes_a_warning,
    ),
    (
        "unwritable_parents_cause_a_warning",
        unwritable_parents_cause_a_warning,
    ),
];

fn a_volume_over_var_tmp_causes_a_warning(user: AgentUser) {
    let world = SandboxFixture::new(user, "true");
    let warnings = world
        .with_temporary()
        .with_volume("/var")
        .run()
        .report
        .warnings;
    let words = "this job has no /var/tmp: the volume v0 at /var hides it; mount the volume at";
    assert!(
        warnings.iter().any(|it| it.starts_with(words)),
        "{warnings:?}"
    );
}

fn concurrent_jobs_have_distant_process_ids(user: AgentUser) {
    // All live at once, and each gives out ids for a while.
    let script = "for i in 1 2 3 4 5 6 7 8; do sh -c 'echo $$'; done; sleep 0.3";
    let ids = thread::scope(|scope| {
        let jobs: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| run_and_list_ids(&SandboxFixture::new(user, script))))
            .collect();
        jobs.into_iter()
            .flat_map(|job| job.join().unwrap())
            .collect::<Vec<u32>>()
    });
    let different: BTreeSet<u32> = ids.iter().copied().collect();
    assert_eq!(different.len(), 4 * 8, "{ids:?}");
    assert!(ids.iter().all(|id| *id > 300), "{ids:?}");
}

/// Runs a job beside others, which a look at the whole host would mistake for what it left.
fn run_and_list_ids(world: &SandboxFixture) -> Vec<u32> {
    assert!(world.spawn().wait().unwrap().success());
    let output = world.read("out");
    output.lines().map(|id| id.parse().unwrap()).collect()
}

fn private_tmp_is_empty_at_start(user: AgentUser) {
    let script = "ls -A /tmp /var/tmp; echo x >/tmp/note && echo y >/var/tmp/note; \
                  stat -c %a /tmp /var/tmp; stat -f -c %T /tmp; mkdir -p /tmp/closed/d; \
                  chmod 0 /tmp/closed";
    let world = SandboxFixture::new(user, script).with_temporary();
    let kind = std::process::Command::new("stat")
        .args(["-f", "-c", "%T"])
        .arg(world.path(""))
        .output()
        .unwrap();
    let kind = String::from_utf8_lossy(&kind.stdout).into_owned();
    assert_eq!(
        world.expect_output(),
        format!("/tmp:\n\n/var/tmp:\n1777\n1777\n{kind}")
    );
    assert!(!Path::new("/tmp/note").exists());
    assert_eq!(world.read("temporary/tmp/note"), "x\n");
    assert_eq!(world.read("temporary/var-tmp/note"), "y\n");
    fs::set_permissions(
        world.path("temporary/tmp/closed"),
        fs::Permissions::from_mode(0o700),
    )
    .unwrap();
}

fn shared_memory_is_private_and_bounded(user: AgentUser) {
    let script = "ls -A /dev/shm; echo x >/dev/shm/bafs-note; stat -f -c '%T %c' /dev/shm; \
                  ! head -c 2M /dev/zero >/dev/shm/large";
    assert_eq!(
        SandboxFixture::new(user, script)
            .with_temporary()
            .expect_output(),
        "tmpfs 1000\n",
        "as many files as pages, or a thousand"
    );
    assert!(!Path::new("/dev/shm/bafs-note").exists());
}

fn named_paths_are_the_hosts(user: AgentUser) {
    let mut world =
        SandboxFixture::new(user, "cat own/file; ls -A /tmp | wc -l; echo new >own/new");
    fs::create_dir(world.path("own")).unwrap();
    fs::write(world.path("own/file"), "of the host\n").unwrap();
    std::os::unix::fs::chown(world.path("own"), Some(user.uid()), None).unwrap();
    world = world.with_temporary();
    world.task.plan.working_directory = world.path("");
    let named = world.path("own/file").into_os_string();
    let temporary = world.task.plan.temporary.as_mut().unwrap();
    temporary.named_paths.push(named);
    assert_eq!(world.expect_output(), "of the host\n1\n");
    assert_eq!(world.read("own/new"), "new\n");
}

fn named_files_of_tmp_can_be_replaced(user: AgentUser) {
    let named = tempfile::NamedTempFile::with_prefix_in("bafs-named-", "/tmp").unwrap();
    fs::write(named.path(), "old\n").unwrap();
    std::os::unix::fs::chown(named.path(), Some(user.uid()), None).unwrap();
    let script = "cat $F && echo more >>$F && echo new >$F.new && mv $F.new $F && cat $F && \
                  rm $F && echo again >$F && cat $F";
    let mut world = SandboxFixture::new(user, script).with_temporary();
    let path = named.path().as_os_str().to_owned();
    let variable = ("F".into(), path.clone());
    world.task.plan.environment.push(variable);
    let temporary = world.task.plan.temporary.as_mut().unwrap();
    temporary.named_paths.push(path);
    assert_eq!(world.expect_output(), "old\nnew\nagain\n");
    // What it wrote before it took another in its place is the host's.
    assert_eq!(fs::read_to_string(named.path()).unwrap(), "old\nmore\n");
}

fn shared_tmp_is_the_hosts(user: AgentUser) {
    let world = SandboxFixture::new(user, "cat $HERE/file; ls -A /var/tmp");
    fs::write(world.path("file"), "of the host\n").unwrap();
    let mut world = world.with_temporary();
    let temporary = world.task.plan.temporary.as_mut().unwrap();
    temporary.shared_directories.insert("/tmp".to_owned());
    let here = ("HERE".into(), world.path("").into_os_string());
    world.task.plan.environment.push(here);
    assert_eq!(world.expect_output(), "of the host\n");
}

fn mount_points_leave_their_parent_writable(user: AgentUser) {
    let script = "cat a/b/name && mkdir kept && echo x >kept/file && stat -f -c %T .";
    let world = SandboxFixture::new(user, script);
    let home = world.path("home");
    fs::create_dir(&home).unwrap();
    std::os::unix::fs::chown(&home, Some(user.uid()), None).unwrap();
    let kind = std::process::Command::new("stat")
        .args(["-f", "-c", "%T"])
        .arg(&home)
        .output()
        .unwrap();
    let kind = String::from_utf8_lossy(&kind.stdout).into_owned();
    let mut world = world.with_volume(home.join("a/b"));
    world.task.plan.working_directory.clone_from(&home);
    assert_eq!(world.expect_output(), format!("volume 0\n{kind}"));
    assert!(!home.join("a").exists());
    assert_eq!(fs::read_to_string(home.join("kept/file")).unwrap(), "x\n");
}

fn mount_points_below_named_paths_work(user: AgentUser) {
    let world = SandboxFixture::new(user, "cat work/name; touch beside").with_temporary();
    let mut world = {
        let path = world.path("work");
        world.with_volume(path)
    };
    world.task.plan.working_directory = world.path("");
    let named = world.path("").into_os_string();
    let temporary = world.task.plan.temporary.as_mut().unwrap();
    temporary.named_paths.push(named);
    assert_eq!(world.expect_output(), "volume 0\n");
    assert!(world.path("beside").exists() && !world.path("work").exists());
}

fn killed_jobs_leave_no_mount_point(user: AgentUser) {
    let world = SandboxFixture::new(user, "touch /bafs-t/started; sleep 60").with_agent_directory();
    let point = world.path("point");
    let world = world.with_volume(&point);
    let mut agent = world.spawn();
    world.wait_for_file("started");
    assert!(point.is_dir());
    agent.kill().unwrap();
    agent.wait().unwrap();
    world.assert_no_processes(std::time::Duration::from_secs(5));
    for _ in 0..100 {
        if !point.exists() {
            return;
        }
        thread::sleep(std::time::Duration::from_millis(50));
    }
    panic!("{} is left", point.display());
}

fn unwritable_parents_cause_a_warning(user: AgentUser) {
    let world = SandboxFixture::new(user, "true");
    let closed = world.path("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    let is_mine = closed.metadata().unwrap().uid() == user.uid();
    let world = world.with_volume(closed.join("point"));
    let answer = world.run();
    assert_eq!(answer.report.outcome, SandboxOutcome::Exited(0));
    let warnings = answer.report.warnings.concat();
    // Root may write everywhere.
    assert_eq!(warnings.is_empty(), is_mine, "{warnings}");
    if !is_mine {
        assert!(warnings.contains("closed/point") && warnings.contains("mkdir"));
    }
}
