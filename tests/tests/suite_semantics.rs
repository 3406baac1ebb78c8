//! Corners of file systems that suites of others leave out, each on a real mount by every way that
//! data can take. Expectations are those of the manual pages.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use bafs_tests::mounted_volume::{DataPath, MountedVolume};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip, uring};
use rustix::fs::{self as sys, AtFlags, CWD, Mode, OFlags, RawDir, RenameFlags, SeekFrom};
use rustix::io::Errno;

fn check_on_every_path(test: &str, check: impl Fn(&MountedVolume) -> Result<()>) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    for way in DataPath::ALL.into_iter().chain([DataPath::WriteBack]) {
        check(&MountedVolume::start(way)?).map_err(|error| error.context(format!("{way:?}")))?;
    }
    match uring::can_use_rings(&format!("{test}, by rings")) {
        true => {
            check(&MountedVolume::start(DataPath::Ring)?).map_err(|error| error.context("Ring"))
        }
        false => Ok(()),
    }
}

/// Runs a script in the volume; gives what it printed.
fn run_script(stand: &MountedVolume, script: &str) -> Result<String> {
    let mut command = Command::new("sh");
    let output = command
        .args(["-ec", script])
        .current_dir(stand.path())
        .output()?;
    ensure!(
        output.status.success(),
        "{script}: {}",
        printed_text(&output)
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn open_file(path: impl AsRef<Path>, flags: OFlags) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(0o644);
    sys::open(path.as_ref(), flags | OFlags::CLOEXEC, mode).map(|_| ())
}

#[test]
fn mount_protects_a_running_program() -> Result<()> {
    check_on_every_path("mount_protects_a_running_program", |stand| {
        let program = stand.path().join("sleep");
        fs::copy("/bin/sleep", &program)?;
        let mut running = Command::new(&program).arg("60").spawn()?;
        let tries = [
            OFlags::WRONLY,
            OFlags::RDWR,
            OFlags::RDONLY | OFlags::TRUNC,
            OFlags::WRONLY | OFlags::TRUNC,
        ];
        let refused = tries.map(|flags| open_file(&program, flags));
        let size = fs::metadata(&program)?.len();
        running.kill()?;
        running.wait()?;
        ensure!(refused == [Err(Errno::TXTBSY); 4], "{refused:?}");
        ensure!(size == fs::metadata("/bin/sleep")?.len(), "it was emptied");
        Ok(())
    })
}

#[test]
fn mount_lets_programs_stay_in_removed_directories() -> Result<()> {
    check_on_every_path("mount_lets_programs_stay_in_removed_directories", |stand| {
        let script = "mkdir d; cd d; rmdir ../d; ls; stat -c %h .; (: > x) 2>/dev/null || echo no";
        let said = run_script(stand, script)?;
        ensure!(said == "0\nno", "{said}");
        Ok(())
    })
}

#[test]
fn mount_clears_privileges_of_files_on_foreign_writes() -> Result<()> {
    check_on_every_path(
        "mount_clears_privileges_of_files_on_foreign_writes",
        |stand| {
            let (file, other) = (
                stand.path().join("f"),
                "setpriv --reuid 65534 --regid 65534",
            );
            for change in [
                "dd of=f conv=notrunc status=none",
                "dd of=f conv=notrunc oflag=direct bs=4096 status=none",
                "truncate -s 3 f",
                "fallocate -l 9000 f",
            ] {
                for (before, after) in [("6777", "777"), ("6766", "766"), ("2767", "767")] {
                    fs::write(&file, vec![b'x'; 4096])?;
                    let script = format!(
                        "chmod {before} f; head -c 4096 /dev/zero | \
                         {other} --clear-groups {change}; stat -c %a f; ls -l f > /dev/null; \
                         stat -c %a f"
                    );
                    let said = run_script(stand, &script)?;
                    ensure!(
                        said == format!("{after}\n{after}"),
                        "{change}: {before} became {said}"
                    );
                }
            }
            fs::set_permissions(&file, Permissions::from_mode(0o6777))?;
            let kept = run_script(stand, "echo by root > f; stat -c %a f")?;
            ensure!(kept == "6777", "root took it away: {kept}");
            Ok(())
        },
    )
}

/// What a change by user 1000 leaves of the set-group-id bit where the group may not execute.
const SET_GROUP_ID_CASES: [(&str, &str, &str); 12] = [
    ("--clear-groups", "chgrp 1000 f", "745"),
    ("--clear-groups", "chown 1000 f", "745"),
    ("--clear-groups", "truncate -s 3 f", "745"),
    ("--groups 5,2000", "chgrp 1000 f", "2745"),
    ("--groups 5,2000", "chown 1000 f", "2745"),
    ("--groups 5,2000", "truncate -s 3 f", "2745"),
    ("--groups 5,2000", "dd if=/bin/sh of=f count=1", "2745"),
    (
        "--groups 5,2000",
        "dd if=/bin/sh of=f count=1 conv=notrunc",
        "2745",
    ),
    (
        "--groups 5,2000",
        "dd if=/bin/sh of=f count=8 oflag=direct conv=notrunc",
        "2745",
    ),
    ("--groups 5,2000", "fallocate -l 9000 f", "2745"),
    ("--groups 5,200", "fallocate -l 9000 f", "745"),
    ("--groups 5,200", "dd if=/bin/sh of=f count=1", "745"),
];

#[test]
fn mount_clears_set_group_id_for_non_members() -> Result<()> {
    let test = "mount_clears_set_group_id_for_non_members";
    let script = |(groups, change, _): (&str, &str, &str)| {
        format!(
            "rm -f f; echo content > f; chown 1000:2000 f; chmod 2745 f; stat f > /dev/null; \
             setpriv --reuid 1000 --regid 1000 {groups} {change} 2> /dev/null; stat -c %a f"
        )
    };
    check_on_every_path(test, |stand| {
        for case in SET_GROUP_ID_CASES {
            let said = run_script(stand, &script(case))?;
            ensure!(said == case.2, "{case:?}: {said}");
        }
        Ok(())
    })
}

#[test]
fn mount_refuses_unsupported_features() -> Result<()> {
    check_on_every_path("mount_refuses_unsupported_features", |stand| {
        let file = stand.path().join("f");
        fs::write(&file, "x")?;
        // Owner, user 1, group, mask, others: each a tag, bits and an id.
        let entries = [
            (1, 6, -1),
            (2, 6, 1),
            (4, 4, -1),
            (16, 6, -1),
            (32, 4, -1_i32),
        ];
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, bits, id) in entries {
            list.extend([tag, 0, bits, 0]);
            list.extend(id.to_le_bytes());
        }
        let set = |name| sys::setxattr(&file, name, &list, sys::XattrFlags::empty());
        for name in ["system.posix_acl_access", "trusted.x"] {
            ensure!(
                set(name) == Err(Errno::OPNOTSUPP),
                "{name}: {:?}",
                set(name)
            );
        }
        ensure!(set("user.x") == Ok(()));
        let temporary = open_file(stand.path(), OFlags::TMPFILE | OFlags::RDWR);
        ensure!(temporary == Err(Errno::OPNOTSUPP), "{temporary:?}");
        let collapse = sys::FallocateFlags::COLLAPSE_RANGE;
        let file = File::options().write(true).open(&file)?;
        ensure!(sys::fallocate(file, collapse, 0, 4096) == Err(Errno::OPNOTSUPP));
        Ok(())
    })
}

#[test]
fn mount_keeps_offsets_in_a_changing_directory() -> Result<()> {
    check_on_every_path("mount_keeps_offsets_in_a_changing_directory", |stand| {
        let directory = stand.create_directory("d")?;
        let name = |number| format!("{number:04}{}", "n".repeat(60));
        for number in 0..1_500 {
            File::create(directory.join(name(number)))?;
        }
        let fd = sys::open(
            &directory,
            OFlags::RDONLY | OFlags::DIRECTORY,
            Mode::empty(),
        )?;
        let all = read_entries(&fd, usize::MAX)?;
        ensure!(all.len() == 1_502, "{} entries", all.len());
        for at in (1..all.len()).step_by(97) {
            sys::seek(&fd, SeekFrom::Start(all[at - 1].1))?;
            let next = read_entries(&fd, 1)?;
            ensure!(next[0].0 == all[at].0, "{} is not {}", next[0].0, all[at].0);
        }
        // Every tenth stays; the others go and new ones come while it is listed.
        sys::seek(&fd, SeekFrom::Start(0))?;
        let mut seen = Vec::new();
        for round in 0_usize.. {
            let some = read_entries(&fd, 40)?;
            let Some(last) = some.last() else { break };
            sys::seek(&fd, SeekFrom::Start(last.1))?;
            seen.extend(some.into_iter().map(|(name, _)| name));
            for number in (round * 37..round * 37 + 37).filter(|number| number % 10 != 0) {
                // Some are gone already.
                let _ = fs::remove_file(directory.join(name(number)));
            }
            File::create(directory.join(format!("new{round}")))?;
        }
        for number in (0..1_500).step_by(10) {
            let count = seen.iter().filter(|seen| **seen == name(number)).count();
            ensure!(count == 1, "{} was listed {count} times", name(number));
        }
        sys::seek(&fd, SeekFrom::Start(0))?;
        let now: BTreeSet<_> = read_entries(&fd, usize::MAX)?.into_iter().collect();
        let there = fs::read_dir(&directory)?.count() + 2;
        ensure!(now.len() == there, "{} entries of {there}", now.len());
        Ok(())
    })
}

/// Names from the stream's place on, at most `most`, each with the place behind it.
fn read_entries(fd: &impl std::os::fd::AsFd, most: usize) -> Result<Vec<(String, u64)>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut stream = RawDir::new(fd, &mut buffer);
    let mut found = Vec::new();
    while let Some(entry) = stream.next() {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        found.push((name, entry.next_entry_cookie()));
        if found.len() == most {
            break;
        }
    }
    Ok(found)
}

#[test]
fn mount_holds_paths_of_a_thousand_levels() -> Result<()> {
    check_on_every_path("mount_holds_paths_of_a_thousand_levels", |stand| {
        let script = "i=0; while [ $i -lt 1023 ]; do mkdir d; cd -P d; i=$((i+1)); done; \
            echo deep > f; cat f; cd /; rm -r \"$OLDPWD/../..\" 2>/dev/null || true";
        ensure!(run_script(stand, script)? == "deep");
        run_script(stand, "rm -r d").map(|_| ())
    })
}

#[test]
fn mount_locks_as_a_local_file_system() -> Result<()> {
    // Two processes that wait for each other: one of them must be told.
    const DEADLOCK_SCRIPT: &str = r#"
        use Fcntl; use POSIX qw(:errno_h);
        sub lock { my ($f, $w, $at) = @_;
            my $l = pack('s s x4 q q l x4', F_WRLCK, 0, $at, 1, 0); fcntl($f, $w, $l) ? 0 : $!+0 }
        open(my $f, '+>', 'l') or die; pipe(my $r, my $w); pipe(my $r2, my $w2);
        my $pid = fork;
        if (!$pid) {
            open(my $g, '+<', 'l') or die; lock($g, F_SETLKW, 1) and die;
            syswrite($w, 'x'); sysread($r2, my $b, 1);
            alarm 20; my $e = lock($g, F_SETLKW, 0); exit($e == EDEADLK ? 1 : $e);
        }
        sysread($r, my $b, 1); lock($f, F_SETLKW, 0) and die;
        print lock($f, F_SETLK, 1) == EAGAIN ? "busy " : "free ";
        syswrite($w2, 'x'); select(undef, undef, undef, 0.3);
        alarm 20; my $e = lock($f, F_SETLKW, 1);
        my $all = pack('s s x4 q q l x4', F_UNLCK, 0, 0, 0, 0); fcntl($f, F_SETLK, $all);
        waitpid($pid, 0); my $c = $? >> 8;
        print(($e == EDEADLK) + ($c == 1) == 1 ? "one was told " : "$e $c ");
        lock($f, F_SETLKW, 5) and die; open(my $again, '<', 'l'); close $again;
        if (!fork) { open(my $g, '+<', 'l'); print lock($g, F_SETLK, 5) ? "kept" : "closed"; exit }
        wait;
    "#;
    check_on_every_path("mount_locks_as_a_local_file_system", |stand| {
        let output = Command::new("perl")
            .args(["-e", &format!("$| = 1; {DEADLOCK_SCRIPT}")])
            .current_dir(stand.path())
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            text == "busy one was told closed",
            "{}",
            printed_text(&output)
        );
        let flock = "flock -n l sh -c 'flock -n l true || echo held'; flock -n l echo free";
        ensure!(run_script(stand, flock)? == "held\nfree");
        Ok(())
    })
}

#[test]
fn mount_notifies_watchers_of_changes() -> Result<()> {
    check_on_every_path("mount_notifies_watchers_of_changes", |stand| {
        use sys::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
        let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        inotify::add_watch(&watch, stand.path(), WatchFlags::ALL_EVENTS)?;
        run_script(stand, "echo x > a; mv a b; rm b")?;
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(watch, &mut buffer);
        let mut seen = ReadFlags::empty();
        while let Ok(event) = reader.next() {
            seen |= event.events();
        }
        let all = ReadFlags::CREATE
            | ReadFlags::MODIFY
            | ReadFlags::CLOSE_WRITE
            | ReadFlags::MOVED_FROM
            | ReadFlags::MOVED_TO
            | ReadFlags::DELETE;
        ensure!(seen.contains(all), "{seen:?}");
        Ok(())
    })
}

#[test]
fn mount_shows_the_volumes_own_size() -> Result<()> {
    check_on_every_path("mount_shows_the_volumes_own_size", |stand| {
        let before = sys::statvfs(stand.path())?;
        ensure!(before.f_blocks * before.f_frsize / 1_000_000 == 2_000);
        ensure!(before.f_files == 100_000 && before.f_namemax == 255);
        fs::write(stand.path().join("f"), vec![1; 1 << 20])?;
        let after = sys::statvfs(stand.path())?;
        ensure!(before.f_bfree - after.f_bfree >= 256 && before.f_ffree - after.f_ffree == 1);
        Ok(())
    })
}

#[test]
fn mount_keeps_volumes_apart() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("mount_keeps_volumes_apart", &reason);
        return Ok(());
    }
    let (one, other) = (
        MountedVolume::start(DataPath::Inline)?,
        MountedVolume::start(DataPath::Inline)?,
    );
    let (file, new) = (one.path().join("f"), other.path().join("f"));
    fs::write(&file, "x")?;
    let moved = sys::renameat_with(CWD, &file, CWD, &new, RenameFlags::empty());
    ensure!(moved == Err(Errno::XDEV), "{moved:?}");
    let linked = sys::linkat(CWD, &file, CWD, &new, AtFlags::empty());
    ensure!(linked == Err(Errno::XDEV), "{linked:?}");
    Ok(())
}

#[test]
fn mount_refuses_every_change_of_a_cache() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("mount_refuses_every_change_of_a_cache", &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["50MB"])?;
    world.wait_for_servers(2)?;
    world.write_home("data/f", b"content")?;
    world.write_home("data/d/g", b"more")?;
    let create = ["volume", "create", "c", "--node", "n1", "--size", "20MB"];
    world.run_json(&[&create[..], &["--cache", "bafs://home/data"]].concat())?;
    // Each line is tried alone; the plain directory is mounted read-only over itself.
    let script = "cd $1; try() { sh -c \"$1\" 2>&1 | sed 's/.*: //' | head -1; }; \
        for c in 'echo x > f' 'echo x >> f' ': > new' 'mkdir new' 'mkdir d' 'rmdir d' 'rm -f f' \
         'rm f/x' 'mv f new' 'mv d e' 'mv f d/h' 'ln f new' 'ln -s f new' 'mkfifo new' \
         'chmod 600 f' 'chown 1 f' 'touch f' 'touch -h -d @5 f' 'truncate -s 1 f' \
         'setfattr -n user.x -v 1 f' 'setfattr -x user.x f' 'mknod new c 1 3' 'cat none' \
         'cat f/x' 'cat d' 'fallocate -l 100 f' 'dd if=f of=f conv=notrunc status=none' \
         'flock f true && echo locked' 'cat f d/g' 'getfattr -n user.x f'; \
        do echo \"$c: $(try \"$c\")\"; done";
    let cache = [
        "exec", "--mount", "c:/c", "--", "/bin/sh", "-c", script, "sh", "/c",
    ];
    let found = world.bafs_command(&cache).output()?;
    let plain = world.home.path().join("data");
    let read_only = format!("mount --bind $1 $1; mount -o remount,bind,ro $1; {script}");
    let expected = Command::new("unshare")
        .args(["--mount", "sh", "-c", &read_only, "sh"])
        .arg(&plain)
        .output()?;
    let lines = |output: &std::process::Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (found_lines, expected_lines) = (lines(&found), lines(&expected));
    ensure!(found_lines.len() == 30, "{}", printed_text(&found));
    let differs: Vec<_> = found_lines
        .iter()
        .zip(&expected_lines)
        .filter(|(found, expected)| found != expected)
        .collect();
    ensure!(
        differs.is_empty(),
        "not as a read-only directory: {differs:#?}"
    );
    ensure!(
        found_lines
            .iter()
            .filter(|it| it.ends_with("Read-only file system"))
            .count()
            >= 18
    );
    Ok(())
}

#[test]
fn mount_ends_jobs_with_overflowing_mapped_pages() -> Result<()> {
    let test = "mount_ends_jobs_with_overflowing_mapped_pages";
    let no_python = Command::new("python3").arg("-V").output().is_err();
    if let Some(reason) = mount_obstacle().or_else(|| no_python.then(|| "no python3".to_owned())) {
        report_skip(test, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["50MB"])?;
    world.wait_for_servers(2)?;
    let create = ["volume", "create", "w", "--node", "n1"];
    world.run_json(&[&create[..], &["--size", "1MB", "--files", "9"]].concat())?;
    // Far too much, and one request of which a part fits.
    for (before, mapped) in [(0, 5 << 20), (900_000, 1 << 20)] {
        let program = format!(
            "import mmap, os, time\nfor old in os.listdir('/w'): os.remove('/w/' + old)\n\
            open('/w/b', 'wb').write(b'b' * {before})\n\
            f = open('/w/m', 'w+b'); f.truncate({mapped})\n\
            m = mmap.mmap(f.fileno(), 0); m[:] = b'q' * {mapped}\n\
            try: m.flush()\nexcept OSError as e: print('errno', e.errno, flush=True)\n\
            time.sleep(60)"
        );
        let args = ["exec", "--mount", "w:/w", "--", "python3", "-c", &program];
        let output = world.bafs_command(&args).output()?;
        let text = printed_text(&output);
        ensure!(output.status.code() == Some(75), "{text}");
        let is_told = text.contains("errno 28") && text.contains("NoSpace");
        ensure!(is_told, "{text}");
    }
    Ok(())
}
