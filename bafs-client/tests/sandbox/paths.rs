//! Cases: what the job sees, where, and under which user.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use bafs_client::sandbox::{
    Access, JobUser, NotStartedReason, Privilege, SandboxOutcome, job_environment,
};

use crate::Case;
use crate::agent::ROLE;
use crate::sandbox_fixture::{AgentUser, HostSnapshot, SandboxFixture, UNUSED_USER_ID};

pub(crate) const CASES: &[Case] = &[
    (
        "volumes_appear_at_their_paths",
        volumes_appear_at_their_paths,
    ),
    ("tmp_can_be_a_volume", tmp_can_be_a_volume),
    (
        "a_path_inside_tmp_leaves_tmp_usable",
        a_path_inside_tmp_leaves_tmp_usable,
    ),
    (
        "volumes_appear_inside_host_directories",
        volumes_appear_inside_host_directories,
    ),
    (
        "files_and_broken_links_cannot_be_mounted_on",
        files_and_broken_links_cannot_be_mounted_on,
    ),
    ("a_file_can_be_a_volume", a_file_can_be_a_volume),
    (
        "a_read_only_volume_refuses_writes",
        a_read_only_volume_refuses_writes,
    ),
    ("other_paths_are_the_hosts", other_paths_are_the_hosts),
    ("writes_outside_volumes_fail", writes_outside_volumes_fail),
    (
        "the_agents_mount_points_are_hidden",
        the_agents_mount_points_are_hidden,
    ),
    ("many_volumes_can_be_mounted", many_volumes_can_be_mounted),
    (
        "one_location_under_two_names_is_refused",
        one_location_under_two_names_is_refused,
    ),
    ("a_missing_source_is_reported", a_missing_source_is_reported),
    (
        "the_job_has_the_users_identity",
        the_job_has_the_users_identity,
    ),
    (
        "the_job_sees_only_its_processes",
        the_job_sees_only_its_processes,
    ),
    (
        "the_job_gets_the_planned_environment",
        the_job_gets_the_planned_environment,
    ),
    (
        "the_job_inherits_no_descriptors",
        the_job_inherits_no_descriptors,
    ),
    (
        "unusual_working_directories_are_handled",
        unusual_working_directories_are_handled,
    ),
    (
        "a_volume_over_the_working_directory_is_named",
        a_volume_over_the_working_directory_is_named,
    ),
    ("the_sandbox_check_passes", the_sandbox_check_passes),
];

pub(crate) const ROOT_CASES: &[Case] = &[
    ("root_becomes_another_user", root_becomes_another_user),
    (
        "missing_privileges_are_explained",
        missing_privileges_are_explained,
    ),
];

fn volumes_appear_at_their_paths(user: AgentUser) {
    let output = SandboxFixture::new(
        user,
        "cat /mydata/name /data/in/name /xyz/share/db/name /opt/name",
    )
    .with_volume("/mydata")
    .with_volume("/data/in")
    .with_volume("/xyz/share/db")
    .with_volume("/opt")
    .expect_output();
    assert_eq!(output, "volume 0\nvolume 1\nvolume 2\nvolume 3\n");
}

fn tmp_can_be_a_volume(user: AgentUser) {
    let output = SandboxFixture::new(user, "cat /tmp/name && ls -A /tmp && echo x >/tmp/made")
        .with_volume("/tmp");
    assert_eq!(output.expect_output(), "volume 0\nname\n");
    assert!(!Path::new("/tmp/made").exists());
}

fn a_path_inside_tmp_leaves_tmp_usable(user: AgentUser) {
    let world = SandboxFixture::new(
        user,
        "cat /tmp/bafs-inner/volume/name; echo hi >/tmp/bafs-note && cat /tmp/bafs-note",
    )
    .with_temporary()
    .with_volume("/tmp/bafs-inner/volume");
    assert_eq!(world.expect_output(), "volume 0\nhi\n");
    assert!(!Path::new("/tmp/bafs-inner").exists());
    assert!(!Path::new("/tmp/bafs-note").exists());
}

fn volumes_appear_inside_host_directories(user: AgentUser) {
    let world = SandboxFixture::new(
        user,
        "cat data/name sub/deep/file plain; cat link; echo new >sub/new",
    );
    let run = world.path("run");
    fs::create_dir_all(run.join("sub/deep")).unwrap();
    fs::write(run.join("sub/deep/file"), "deep\n").unwrap();
    fs::write(run.join("plain"), "plain\n").unwrap();
    std::os::unix::fs::symlink("plain", run.join("link")).unwrap();
    std::os::unix::fs::chown(run.join("sub"), Some(user.uid()), None).unwrap();
    let mut world = world.with_volume(run.join("data"));
    world.task.plan.working_directory = run.clone();
    assert_eq!(world.expect_output(), "volume 0\ndeep\nplain\nplain\n");
    assert!(!run.join("data").exists());
    // The entries are the host's own: what the job does in them lasts.
    assert_eq!(fs::read_to_string(run.join("sub/new")).unwrap(), "new\n");
}

fn files_and_broken_links_cannot_be_mounted_on(user: AgentUser) {
    for (path, objection) in [
        ("file", "file is a file:"),
        ("file/below", "file is a file:"),
        ("to-file", "to-file is a file:"),
        (
            "dangling",
            "dangling is a symbolic link that leads nowhere:",
        ),
        (
            "dangling/below",
            "dangling is a symbolic link that leads nowhere:",
        ),
        (
            "circular",
            "circular is a symbolic link that leads back to itself:",
        ),
        (
            "to-dev/x",
            "the mount path '/dev/x' lies under /proc, /sys or /dev",
        ),
    ] {
        let world = SandboxFixture::new(user, "true");
        fs::write(world.path("file"), "x").unwrap();
        for (link, target) in [
            ("to-file", "file"),
            ("dangling", "/nowhere"),
            ("circular", "circular"),
            ("to-dev", "/dev"),
        ] {
            std::os::unix::fs::symlink(target, world.path(link)).unwrap();
        }
        let at = world.path(path);
        let world = world.with_volume(at);
        let SandboxOutcome::NotStarted(refusal) = world.run().report.outcome else {
            panic!("{path}")
        };
        assert_eq!(refusal.reason, NotStartedReason::PathUnusable);
        assert!(refusal.message.contains(objection), "{path}: {refusal}");
        assert!(refusal.message.ends_with("give volume v0 another path"));
        assert_eq!(fs::read_to_string(world.path("file")).unwrap(), "x");
    }
}

fn a_file_can_be_a_volume(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "cat /config/settings /etc/hostname");
    for name in ["one", "two"] {
        fs::write(world.path(name), format!("{name}\n")).unwrap();
    }
    world.add_volume(world.path("one"), "/config/settings", Access::ReadOnly);
    world.add_volume(world.path("two"), "/etc/hostname", Access::ReadWrite);
    assert_eq!(world.expect_output(), "one\ntwo\n");
}

fn a_read_only_volume_refuses_writes(user: AgentUser) {
    let mut world =
        SandboxFixture::new(user, "echo x >/w/made && cat /r/name && ! echo x >/r/made");
    world.task.mounts = 2;
    world.add_volume("@0", "/w", Access::ReadWrite);
    world.add_volume("@1", "/r", Access::ReadOnly);
    assert_eq!(world.expect_output(), "volume 1\n");
    assert!(
        world.read("err").contains("Read-only file system"),
        "{}",
        world.read("err")
    );
}

fn other_paths_are_the_hosts(user: AgentUser) {
    let list = "ls -A / && ls -A /usr && ls -A /etc | wc -l && readlink -f /bin/sh";
    let world = SandboxFixture::new(user, list);
    let here = Command::new("sh").args(["-c", list]).output().unwrap();
    assert_eq!(world.expect_output(), String::from_utf8_lossy(&here.stdout));
}

fn writes_outside_volumes_fail(user: AgentUser) {
    let script = "! mkdir /made && ! mkdir /data/made";
    SandboxFixture::new(user, script)
        .with_volume("/data/in")
        .expect_output();
}

fn the_agents_mount_points_are_hidden(user: AgentUser) {
    // Only below the directories that carry them: the host may have mounts of its own.
    let script = "cat /v/name; grep -cE ' /(boot|media|srv|mnt|opt|proc/fs)/.bafs-' /proc/mounts; \
                  ls -A /boot /media /srv /mnt";
    let world = SandboxFixture::new(user, script).with_volume("/v");
    let here = Command::new("sh")
        .args(["-c", "ls -A /boot /media /srv /mnt"])
        .output()
        .unwrap();
    assert_eq!(
        world.expect_output(),
        format!("volume 0\n0\n{}", String::from_utf8_lossy(&here.stdout))
    );
}

fn many_volumes_can_be_mounted(user: AgentUser) {
    let paths = (0..32).map(|number| format!("/many/{}/v{number}", number % 5));
    let script = "cat /many/*/*/name | sort -u | wc -l";
    let world = paths.fold(
        SandboxFixture::new(user, script),
        SandboxFixture::with_volume,
    );
    assert_eq!(world.expect_output().trim(), "32");
}

fn one_location_under_two_names_is_refused(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "true");
    fs::create_dir(world.path("real")).unwrap();
    std::os::unix::fs::symlink("real", world.path("link")).unwrap();
    let (real, link) = (world.path("real/in"), world.path("link/in"));
    world = world.with_volume(real).with_volume(link);
    let SandboxOutcome::NotStarted(refusal) = world.run().report.outcome else {
        panic!()
    };
    assert_eq!(refusal.reason, NotStartedReason::PathUnusable);
    assert!(refusal.message.contains("real/in"), "{refusal}");
}

fn a_missing_source_is_reported(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "true");
    world.add_volume("/no/such/source", "/in", Access::ReadWrite);
    let SandboxOutcome::NotStarted(refusal) = world.run().report.outcome else {
        panic!()
    };
    assert_eq!(refusal.reason, NotStartedReason::VolumeUnusable);
    assert!(refusal.message.contains("/no/such/source"), "{refusal}");
}

fn the_job_has_the_users_identity(user: AgentUser) {
    let world = SandboxFixture::new(
        user,
        "id -u; id -g; echo x >/v/made; stat -c %u /v/made; umask",
    )
    .with_volume("/v");
    let answer = world.run();
    let uid = user.uid();
    assert_eq!(world.read("out"), format!("{uid}\n{uid}\n{uid}\n0022\n"));
    let expected = match user {
        AgentUser::Root => Privilege::Root,
        AgentUser::User => Privilege::UserNamespace { uid, gid: uid },
    };
    assert_eq!(answer.privilege, expected);
}

fn the_job_sees_only_its_processes(user: AgentUser) {
    // The shell must not be replaced by its last command, hence the final echo.
    let script = "ls /proc | grep -c '^[0-9]'; tr '\\0' ' ' </proc/1/cmdline; echo; \
                  readlink /proc/self/exe; ls -l /proc/1/fd 2>&1; echo";
    let output = SandboxFixture::new(user, script).expect_output();
    let lines: Vec<_> = output.lines().collect();
    assert!(lines[0].parse::<u32>().unwrap() <= 4, "{output}");
    assert!(lines[1].starts_with("bafs job-init inner"), "{output}");
    assert!(
        lines[2].contains("readlink") || lines[2].contains("coreutils"),
        "{output}"
    );
    if user == AgentUser::User {
        assert!(
            lines[3].contains("denied") || lines[3].contains("cannot open"),
            "{output}"
        );
    }
}

fn the_job_gets_the_planned_environment(user: AgentUser) {
    let mut world =
        SandboxFixture::new(user, "env | grep -v '^_=\\|SHLVL'").with_volume("/my data");
    world.task.plan.environment = job_environment(
        [
            ("PATH".into(), "/usr/bin:/bin".into()),
            ("BAFS_TOKEN".into(), "secret".into()),
        ],
        &world.task.plan.job,
        &world.task.plan.volumes,
    );
    let output = world.expect_output();
    let mut lines: Vec<_> = output.lines().collect();
    lines.sort_unstable();
    let job = format!("BAFS_JOB={}", world.task.plan.job);
    assert_eq!(
        lines,
        [&*job, "BAFS_V0=/my data", "PATH=/usr/bin:/bin", "PWD=/"]
    );
}

fn the_job_inherits_no_descriptors(user: AgentUser) {
    let output =
        SandboxFixture::new(user, "ls -l /proc/self/fd | awk 'NF > 8 {print $9}'").expect_output();
    // The fourth is the one with which `ls` reads the directory.
    assert_eq!(output, "0\n1\n2\n3\n");
}

fn unusual_working_directories_are_handled(user: AgentUser) {
    let mut world = SandboxFixture::new(user, "pwd").with_volume("/data/in");
    world.task.plan.working_directory = "/data/in".into();
    assert_eq!(world.expect_output(), "/data/in\n");

    // The agent's own directory was removed under its feet.
    let mut world = SandboxFixture::new(user, "pwd").with_volume("/data/in");
    let gone = world.path("gone");
    fs::create_dir(&gone).unwrap();
    world.agent_cwd = PathBuf::from(format!("/proc/self/fd/{}", {
        let open = fs::File::open(&gone).unwrap();
        fs::remove_dir(&gone).unwrap();
        use std::os::fd::IntoRawFd;
        open.into_raw_fd()
    }));
    assert_eq!(world.expect_output(), "/\n");

    let mut world = SandboxFixture::new(user, "pwd");
    world.task.plan.working_directory = "/no/such/directory".into();
    let SandboxOutcome::NotStarted(refusal) = world.run().report.outcome else {
        panic!()
    };
    assert_eq!(refusal.reason, NotStartedReason::DirectoryUnusable);
    assert_eq!(refusal.errno, Some(nix::errno::Errno::ENOENT as i32));
    assert!(refusal.message.starts_with("cannot enter"), "{refusal}");
}

fn a_volume_over_the_working_directory_is_named(user: AgentUser) {
    for point in ["above", "link"] {
        let world = SandboxFixture::new(user, "pwd");
        let directory = world.path("above/below");
        fs::create_dir_all(&directory).unwrap();
        std::os::unix::fs::symlink("above", world.path("link")).unwrap();
        let path = world.path(point);
        let mut world = world.with_volume(&path);
        world.task.plan.working_directory = directory.clone();
        let SandboxOutcome::NotStarted(refusal) = world.run().report.outcome else {
            panic!()
        };
        assert_eq!(refusal.reason, NotStartedReason::DirectoryUnusable);
        let words = format!(
            "the volume v0 at {} hides the working directory {}; start in another directory",
            path.display(),
            directory.display()
        );
        assert!(refusal.message.starts_with(&words), "{refusal}");
    }
}

fn the_sandbox_check_passes(user: AgentUser) {
    let world = SandboxFixture::new(user, "true");
    let mut command = Command::new(env::current_exe().unwrap());
    if user == AgentUser::User {
        let ids = [
            format!("--reuid={}", user.uid()),
            format!("--regid={}", user.uid()),
        ];
        command = Command::new("setpriv");
        command
            .args(ids)
            .arg("--clear-groups")
            .arg(env::current_exe().unwrap());
    }
    let status = command
        .arg(ROLE)
        .arg(world.directory.path())
        .arg("check")
        .status()
        .unwrap();
    assert!(status.success());
    let checks: serde_json::Value = serde_json::from_str(&world.read("answer")).unwrap();
    let subjects: Vec<_> = checks
        .as_array()
        .unwrap()
        .iter()
        .map(|c| &c["subject"])
        .collect();
    assert_eq!(
        subjects,
        ["user", "private name space", "/dev/fuse", "fusermount3"]
    );
    assert_eq!(checks[1]["status"], "Fine", "{checks}");
    let whom = if user == AgentUser::Root {
        "as root"
    } else {
        "in a user name space"
    };
    assert!(
        checks[1]["found"].as_str().unwrap().ends_with(whom),
        "{checks}"
    );
    for check in checks.as_array().unwrap() {
        let remedy = check["remedy"].as_str().unwrap();
        assert_eq!(check["status"] == "Fine", remedy.is_empty(), "{check}");
    }
}

fn root_becomes_another_user(user: AgentUser) {
    let mut world = SandboxFixture::new(
        user,
        "id -u; id -g; id -G; grep -E 'NoNewPrivs|CapEff' /proc/self/status; \
         ls /proc/1/fd || true",
    );
    world.task.plan.user = JobUser::OtherUser {
        uid: UNUSED_USER_ID,
        gid: UNUSED_USER_ID,
        groups: vec![7],
    };
    let output = world.expect_output();
    let words: Vec<_> = output.split_whitespace().collect();
    let id = UNUSED_USER_ID.to_string();
    assert_eq!(words[..4], [&*id, &id, &id, "7"]);
    assert_eq!(
        words[4..],
        ["CapEff:", "0000000000000000", "NoNewPrivs:", "1"]
    );
}

fn missing_privileges_are_explained(who: AgentUser) {
    // A user name space of its own lets the limit be changed for this agent alone.
    let world = SandboxFixture::new(who, "true");
    fs::write(world.path("task"), serde_json::to_vec(&world.task).unwrap()).unwrap();
    let script = "echo 0 >/proc/sys/user/max_user_namespaces && \
                  exec setpriv --securebits=+noroot --inh-caps=-all --bounding-set=-all \"$@\"";
    let before = HostSnapshot::take();
    let output = Command::new("unshare")
        .args(["-Ur", "sh", "-c", script, "sh"])
        .arg(env::current_exe().unwrap())
        .arg(ROLE)
        .arg(world.directory.path())
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("user.max_user_namespaces is 0"), "{said}");
    assert!(
        said.contains("sysctl user.max_user_namespaces=15000"),
        "{said}"
    );
    before.assert_unchanged();
}
