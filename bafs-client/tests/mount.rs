//! Real mounts: the kernel, its page cache, and real programs over each kind of tree.
#![allow(
    clippy::unwrap_used,
    reason = "all of this is test, but clippy looks for `#[test]`"
)]

use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::mounted_volume::{MountedVolume, TreeKind, can_mount, for_each_writable_kind, skip};
use crate::test_server::Fault;
use nix::libc;

#[test]
fn noatime_reads_keep_the_access_time() {
    for_each_writable_kind("noatime_reads_keep_the_access_time", |shown| {
        let stored = shown.store.path().join("quiet");
        fs::write(&stored, "content").unwrap();
        let long_ago = UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let times = FileTimes::new()
            .set_accessed(long_ago)
            .set_modified(long_ago);
        let file = OpenOptions::new().write(true).open(&stored).unwrap();
        file.set_times(times).unwrap();
        let mut quiet = OpenOptions::new();
        quiet.read(true).custom_flags(libc::O_NOATIME);
        let mut file = quiet.open(shown.path().join("quiet")).unwrap();
        let mut found = String::new();
        file.read_to_string(&mut found).unwrap();
        drop(file);
        assert_eq!(found, "content");
        for path in [stored, shown.path().join("quiet")] {
            let accessed = fs::metadata(path).unwrap().accessed().unwrap();
            assert_eq!(accessed, long_ago);
        }
    });
}

#[test]
fn files_are_written_and_read() {
    for_each_writable_kind("files_are_written_and_read", |shown| {
        let path = shown.path().join("data");
        let data: Vec<u8> = (0..5_000_000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        fs::write(&path, &data).unwrap();
        assert!(fs::read(&path).unwrap() == data);
        assert!(fs::read(shown.store.path().join("data")).unwrap() == data);
    });
}

#[test]
fn written_ranges_replace_only_their_bytes() {
    for_each_writable_kind("written_ranges_replace_only_their_bytes", |shown| {
        let path = shown.path().join("data");
        fs::write(&path, vec![7; 4_000_000]).unwrap();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).open(&path).unwrap();
        file.write_all_at(b"patch", 3_000_000).unwrap();
        file.sync_all().unwrap();
        let mut part = [0; 7];
        file.read_exact_at(&mut part, 2_999_999).unwrap();
        assert_eq!(&part, b"\x07patch\x07");
    });
}

#[test]
fn appends_follow_the_current_end() {
    for_each_writable_kind("appends_follow_the_current_end", |shown| {
        let path = shown.path().join("data");
        fs::write(&path, [b'.'; 100]).unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(10).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 10);
        let mut log = OpenOptions::new().append(true).open(&path).unwrap();
        log.write_all(b"one").unwrap();
        file.write_all_at(b"!", 20).unwrap();
        log.write_all(b"two").unwrap();
        drop(log);
        let text = fs::read(&path).unwrap();
        assert_eq!((&text[10..13], &text[20..]), (&b"one"[..], &b"!two"[..]));
    });
}

#[test]
fn a_new_file_ends_its_negative_entry() {
    for_each_writable_kind("a_new_file_ends_its_negative_entry", |shown| {
        let path = shown.path().join("none");
        for _ in 0..2 {
            let absent = fs::read(&path).unwrap_err();
            assert_eq!(absent.raw_os_error(), Some(libc::ENOENT));
        }
        File::create_new(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    });
}

#[test]
fn a_rename_replaces_its_target() {
    for_each_writable_kind("a_rename_replaces_its_target", |shown| {
        let at = |name: &str| shown.path().join(name);
        fs::create_dir_all(at("d/e")).unwrap();
        fs::write(at("d/new"), b"2").unwrap();
        fs::write(at("d/old"), b"1").unwrap();
        fs::rename(at("d/new"), at("d/old")).unwrap();
        assert_eq!(fs::read(at("d/old")).unwrap(), b"2");
        assert!(!at("d/new").exists());
    });
}

#[test]
fn links_lead_to_their_targets() {
    for_each_writable_kind("links_lead_to_their_targets", |shown| {
        let at = |name: &str| shown.path().join(name);
        fs::create_dir(at("d")).unwrap();
        fs::write(at("d/old"), b"2").unwrap();
        fs::hard_link(at("d/old"), at("link")).unwrap();
        let metadata = ["link", "d/old"].map(|name| fs::metadata(at(name)).unwrap());
        assert_eq!(metadata.each_ref().map(MetadataExt::nlink), [2, 2]);
        assert_eq!(metadata[0].ino(), metadata[1].ino());
        symlink("d/old", at("soft")).unwrap();
        assert_eq!(fs::read_link(at("soft")).unwrap(), Path::new("d/old"));
        assert_eq!(fs::read(at("soft")).unwrap(), b"2");
    });
}

#[test]
fn an_unlinked_open_file_stays_usable() {
    for_each_writable_kind("an_unlinked_open_file_stays_usable", |shown| {
        let names = ["old", "link"].map(|name| shown.path().join(name));
        fs::write(&names[0], b"2").unwrap();
        fs::hard_link(&names[0], &names[1]).unwrap();
        let mut options = OpenOptions::new();
        let mut open = options.read(true).write(true).open(&names[1]).unwrap();
        for name in &names {
            fs::remove_file(name).unwrap();
        }
        open.seek(SeekFrom::End(0)).unwrap();
        open.write_all(b"more").unwrap();
        open.rewind().unwrap();
        let mut text = String::new();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, "2more");
    });
}

#[test]
fn only_empty_directories_are_removed() {
    for_each_writable_kind("only_empty_directories_are_removed", |shown| {
        let at = |name: &str| shown.path().join(name);
        fs::create_dir_all(at("d/e")).unwrap();
        fs::write(at("file"), b"").unwrap();
        let full = fs::remove_dir(at("d")).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOTEMPTY));
        fs::remove_dir_all(at("d")).unwrap();
        fs::set_permissions(shown.path(), Permissions::from_mode(0o755)).unwrap();
        let left: Vec<_> = fs::read_dir(shown.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["file"]);
    });
}

#[test]
fn attributes_are_kept() {
    for_each_writable_kind("attributes_are_kept", |shown| {
        let path = shown.path().join("f");
        fs::write(&path, b"x").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(2345)).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (1234, 2345));
        let long_ago = UNIX_EPOCH - Duration::from_millis(1_500);
        File::open(&path).unwrap().set_modified(long_ago).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (-2, 500_000_000));
        // A write by an ordinary user takes the set-user-id bit away.
        fs::set_permissions(&path, Permissions::from_mode(0o4777)).unwrap();
        let wrote = Command::new("setpriv")
            .args([
                "--reuid=4321",
                "--regid=4321",
                "--clear-groups",
                "--bounding-set=-all",
            ])
            .args(["sh", "-c", "echo y >>\"$0\""])
            .arg(&path)
            .status()
            .unwrap();
        assert!(
            fs::set_permissions(shown.mount_point.path(), Permissions::from_mode(0o777)).is_ok()
        );
        assert!(wrote.success());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
        let set = Command::new("setfattr")
            .args(["-n", "user.k", "-v", "v"])
            .arg(&path)
            .status();
        if let Ok(status) = set {
            assert!(status.success());
            let mut get = Command::new("getfattr");
            let got = get
                .args(["--only-values", "-n", "user.k"])
                .arg(&path)
                .output()
                .unwrap();
            assert_eq!(got.stdout, b"v");
        } else {
            skip("attributes_are_kept", "no setfattr for extended attributes");
        }
    });
}

#[test]
fn mapped_files_are_shared() {
    let program = r#"
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 10000)
    assert shared[5000:5001] == b"a"
    shared[5000:5001] = b"Z"
    shared.flush()
    with open(sys.argv[1], "rb") as other:
        other.seek(4999)
        assert other.read(3) == b"aZa"
    shared[6000:6001] = b"Y"
"#;
    if Command::new("python3").arg("-V").output().is_err() {
        return skip("mapped_files_are_shared", "no python3");
    }
    for_each_writable_kind("mapped_files_are_shared", |shown| {
        let path = shown.path().join("mapped");
        fs::write(&path, vec![b'a'; 10_000]).unwrap();
        let mapped = Command::new("python3")
            .args(["-c", program])
            .arg(&path)
            .status()
            .unwrap();
        assert!(mapped.success());
        // What was not flushed is written when the program ends.
        let stored = fs::read(shown.store.path().join("mapped")).unwrap();
        assert_eq!(
            (stored.len(), stored[5_000], stored[6_000]),
            (10_000, b'Z', b'Y')
        );
        assert_eq!(fs::read(&path).unwrap(), stored);
    });
}

#[test]
fn large_directories_are_listed_whole() {
    for_each_writable_kind("large_directories_are_listed_whole", |shown| {
        let directory = shown.path().join("many");
        fs::create_dir(&directory).unwrap();
        for i in 0..5_000 {
            fs::write(shown.store.path().join(format!("many/file-{i:05}")), b"").unwrap();
        }
        for _ in 0..2 {
            let mut names: Vec<_> = fs::read_dir(&directory)
                .unwrap()
                .map(|entry| {
                    let entry = entry.unwrap();
                    assert!(entry.metadata().unwrap().is_file());
                    entry.file_name().into_string().unwrap()
                })
                .collect();
            names.sort();
            assert_eq!(names.len(), 5_000);
            assert!(
                names
                    .iter()
                    .enumerate()
                    .all(|(i, n)| *n == format!("file-{i:05}"))
            );
        }
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(fs::read_dir(shown.path()).unwrap().count(), 0);
    });
}

#[test]
fn programs_run_on_and_from_the_mount() {
    let script = r#"
        set -e
        cp /bin/echo here && ./here "from the mount"
        printf '#!/bin/sh\necho script $1\n' >s && chmod +x s && ./s works
        (flock 9; echo locked) 9>lock
        seq 1 20000 | sort -R >shuffled && sort -n shuffled | tail -n1
        fallocate -l 100000 big && stat -c %s big
        dd if=shuffled of=copied bs=64k oflag=append conv=notrunc 2>/dev/null && cmp shuffled copied
        ln -s . self && test -e self/self/s
        mkfifo pipe && (echo through >pipe &) && cat pipe
        if command -v tar >/dev/null; then
            mkdir t && tar cf - s shuffled | tar xf - -C t && cmp shuffled t/shuffled && echo tar
        fi
        if command -v git >/dev/null; then
            git init -q r && cd r && echo a >a && git add a
            git -c user.name=n -c user.email=e commit -qm m && git status --porcelain && cd .. \
                && git -C r log --oneline | wc -l
        fi
        if command -v sqlite3 >/dev/null; then
            sqlite3 base 'pragma journal_mode=delete; create table t(a); insert into t values(42);'
            sqlite3 base 'select a from t'
        fi
    "#;
    for_each_writable_kind("programs_run_on_and_from_the_mount", |shown| {
        let out = Command::new("sh")
            .args(["-c", script])
            .current_dir(shown.path())
            .env("HOME", shown.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{text}{errors}");
        for expected in [
            "from the mount",
            "script works",
            "locked",
            "20000",
            "100000",
            "through",
        ] {
            assert!(
                text.contains(expected),
                "{expected} is missing in {text}{errors}"
            );
        }
    });
    for program in ["git", "sqlite3", "tar"] {
        let found = Command::new("sh")
            .args(["-c", &format!("command -v {program}")])
            .output();
        if !found.unwrap().status.success() {
            skip(
                "programs_run_on_and_from_the_mount",
                &format!("no {program}"),
            );
        }
    }
}

/// Bytes of the data file in the mounted database.
const DATABASE_BYTES: u32 = 300_000;

fn database_content() -> Vec<u8> {
    (0..DATABASE_BYTES).map(|i| (i / 11 % 251) as u8).collect()
}

/// A cache volume with a data file, a link to it, and a program; `None` without mounts.
fn mounted_database(test: &str) -> Option<MountedVolume> {
    can_mount(test).then(|| {
        MountedVolume::new(
            TreeKind::Cache,
            |store| {
                fs::create_dir_all(store.join("db/deep")).unwrap();
                fs::write(store.join("db/deep/a.phr"), database_content()).unwrap();
                fs::write(store.join("db/tool"), "#!/bin/sh\necho tool\n").unwrap();
                fs::set_permissions(store.join("db/tool"), Permissions::from_mode(0o755)).unwrap();
                symlink("deep/a.phr", store.join("db/link")).unwrap();
            },
            10_000,
        )
    })
}

#[test]
fn cache_volumes_list_and_run_their_files() {
    let Some(shown) = mounted_database("cache_volumes_list_and_run_their_files") else {
        return;
    };
    let db = shown.path().join("db");
    let mut names: Vec<_> = fs::read_dir(&db)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["deep", "link", "tool"]);
    assert!(!db.join("none").exists());
    let tool = Command::new(db.join("tool")).output().unwrap();
    assert_eq!(tool.stdout, b"tool\n");
}

#[test]
fn repeated_cache_reads_send_no_message() {
    let Some(shown) = mounted_database("repeated_cache_reads_send_no_message") else {
        return;
    };
    let (db, data) = (shown.path().join("db"), database_content());
    assert!(fs::read(db.join("link")).unwrap() == data);
    let blocks = shown.server.blocks_sent.load(Ordering::Relaxed);
    let expected = DATABASE_BYTES.div_ceil(crate::test_server::BLOCK_BYTES);
    assert_eq!(blocks, u64::from(expected));
    for _ in 0..3 {
        assert!(fs::read(db.join("deep/a.phr")).unwrap() == data);
    }
    assert_eq!(shown.server.blocks_sent.load(Ordering::Relaxed), blocks);
}

#[test]
fn cache_volumes_are_read_only() {
    let Some(shown) = mounted_database("cache_volumes_are_read_only") else {
        return;
    };
    let refused = fs::write(shown.path().join("db/new"), b"").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
}

#[test]
fn cache_reads_count_pages_and_bytes() {
    let Some(shown) = mounted_database("cache_reads_count_pages_and_bytes") else {
        return;
    };
    fs::read(shown.path().join("db/deep/a.phr")).unwrap();
    let usage = shown.volume().usage();
    let mut pages = usage.pages.iter();
    let touched = pages.find(|pages| pages.path == "db/deep/a.phr").unwrap();
    assert_eq!(touched.page_runs, [(0, 74)]);
    assert_eq!(usage.read_bytes, u64::from(DATABASE_BYTES));
}

#[test]
fn remote_reads_are_uncached_and_count_pages_once() {
    if !can_mount("remote_reads_are_uncached_and_count_pages_once") {
        return;
    }
    let fill = |store: &Path| {
        fs::create_dir(store.join("in")).unwrap();
        fs::write(store.join("in/q"), [b'q'; 9_000]).unwrap();
    };
    let shown = MountedVolume::new(TreeKind::Home, fill, 10_000);
    let path = shown.path().join("in/q");
    for _ in 0..3 {
        assert_eq!(fs::read(&path).unwrap(), [b'q'; 9_000]);
    }
    let usage = shown.volume().usage();
    assert_eq!(usage.read_bytes, 27_000);
    assert_eq!(usage.pages.len(), 1);
    assert_eq!(
        (usage.pages[0].path.as_str(), usage.pages[0].size),
        ("in/q", 9_000)
    );
    assert_eq!(usage.pages[0].page_runs, [(0, 3)]);
    // What others change is seen at once.
    fs::write(shown.store.path().join("in/q"), b"other").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"other");
    fs::remove_file(shown.store.path().join("in/q")).unwrap();
    assert!(!path.exists());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "measures that nothing hangs")]
fn a_lost_volume_fails_at_once_and_unmounts() {
    if !can_mount("a_lost_volume_fails_at_once_and_unmounts") {
        return;
    }
    let mut shown = MountedVolume::new(TreeKind::Scratch, |_| {}, 500);
    let path = shown.path().join("f");
    let mut file = File::create(&path).unwrap();
    file.write_all(b"x").unwrap();
    shown.server.set_fault(Fault::Silent);
    let start = Instant::now();
    assert_eq!(
        file.write_all(b"y").unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );
    assert!(start.elapsed() < Duration::from_millis(1_500));
    assert!(shown.losses.blocking_recv().is_some());
    let start = Instant::now();
    assert_eq!(
        file.write_all(b"z").unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );
    assert!(fs::read_dir(shown.path()).is_err());
    assert!(start.elapsed() < Duration::from_millis(100));
    // A file of it is still open: detaching must not wait for that.
    let start = Instant::now();
    shown.mount.take().unwrap().unmount();
    assert!(start.elapsed() < Duration::from_secs(3));
    drop(file);
}
