//! Random file operations, drawn from a seed so that they meet each other's files. Runs none.

use bafs_tests::seeded_rng::SeededRng;
use rustix::fs::{self as sys, FallocateFlags, OFlags, RenameFlags};

/// Files that a side may have open at once.
pub(crate) const OPEN_FILES_MAX: u64 = 4;

/// Largest place in a file that steps touch, in bytes.
const FILE_OFFSET_MAX: u64 = 200_000;

const LINK_TARGETS: [&str; 6] = ["a", "d", "../a", "nothing", "d/b", "s"];

#[derive(Debug, Clone)]
pub(crate) enum FileOperation {
    Open(u64, String, OFlags, u32),
    Close(u64),
    Read(u64, u64, u64),
    Write(u64, u64, u64),
    Append(u64, u64),
    Truncate(u64, u64),
    TruncatePath(String, u64),
    Allocate(u64, FallocateFlags, u64, u64),
    SeekData(u64, bool, u64),
    Copy(u64, u64, u64, u64, u64),
    Sync(u64, bool),
    MakeDirectory(String, u32),
    MakeNode(String, sys::FileType, u32),
    MakeSymlink(&'static str, String),
    MakeLink(String, String, bool),
    Unlink(String),
    RemoveDirectory(String),
    Rename(String, String, RenameFlags),
    Chmod(String, u32),
    Chown(String, u32, u32),
    Touch(String, i64, i64),
    SetXattr(String, &'static str, u64, sys::XattrFlags),
    GetXattr(String, &'static str),
    RemoveXattr(String, &'static str),
    Stat(String),
    StatOpen(u64),
    List(String),
    ReadLink(String),
}

/// Few names, so that steps meet each other; one is as long as a name may be, one too long.
fn draw_name(rng: &mut SeededRng) -> String {
    let short = [
        "a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "d/e/g", "s", "s/a", "d/", "d/../a", "d/.",
    ];
    match rng.next_below(40) {
        0 => "x".repeat(255),
        1 => "x".repeat(256),
        2 => format!("d/{}", "y".repeat(255)),
        _ => rng.choose(&short).to_owned(),
    }
}

pub(crate) fn draw_operation(rng: &mut SeededRng) -> FileOperation {
    let slot = rng.next_below(OPEN_FILES_MAX);
    let (at, length) = (rng.next_below(FILE_OFFSET_MAX), rng.next_below(20_000));
    match rng.next_below(34) {
        0..=4 => draw_open(rng, slot),
        5 => FileOperation::Close(slot),
        6..=7 => FileOperation::Read(slot, at, length),
        8..=10 => FileOperation::Write(slot, at, length),
        11 => FileOperation::Append(slot, length),
        12 => FileOperation::Truncate(slot, at),
        13 => FileOperation::TruncatePath(draw_name(rng), at),
        14 => {
            let keep = FallocateFlags::KEEP_SIZE;
            let modes = [
                FallocateFlags::empty(),
                keep,
                keep | FallocateFlags::PUNCH_HOLE,
                FallocateFlags::ZERO_RANGE,
                FallocateFlags::ZERO_RANGE | keep,
                FallocateFlags::PUNCH_HOLE,
            ];
            FileOperation::Allocate(slot, rng.choose(&modes), at, length)
        }
        15 => FileOperation::SeekData(slot, rng.next_below(2) == 0, at),
        16 => FileOperation::Copy(
            slot,
            rng.next_below(OPEN_FILES_MAX),
            at,
            rng.next_below(FILE_OFFSET_MAX),
            length,
        ),
        17 => FileOperation::Sync(slot, rng.next_below(2) == 0),
        _ => draw_name_operation(rng),
    }
}

fn draw_open(rng: &mut SeededRng, slot: u64) -> FileOperation {
    let access = rng.choose(&[OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR, OFlags::RDWR]);
    let more = [
        OFlags::empty(),
        OFlags::CREATE,
        OFlags::CREATE,
        OFlags::CREATE | OFlags::EXCL,
        OFlags::TRUNC,
        OFlags::CREATE | OFlags::TRUNC,
        OFlags::CREATE | OFlags::APPEND,
        OFlags::APPEND,
        OFlags::NOFOLLOW,
        OFlags::DIRECTORY,
        OFlags::CREATE | OFlags::SYNC,
        OFlags::PATH,
        OFlags::PATH | OFlags::NOFOLLOW,
        OFlags::NOATIME,
    ];
    // To open a FIFO must not wait for its other end.
    let flags = access | rng.choose(&more) | OFlags::NONBLOCK;
    FileOperation::Open(slot, draw_name(rng), flags, draw_mode(rng))
}

fn draw_mode(rng: &mut SeededRng) -> u32 {
    rng.choose(&[
        0o644, 0o600, 0o755, 0o777, 0o4755, 0o2755, 0o1777, 0o2770, 0o0, 0o444,
    ])
}

fn draw_name_operation(rng: &mut SeededRng) -> FileOperation {
    let path = draw_name(rng);
    let xattr = rng.choose(&["user.a", "user.b", "user.c", "nothing.a"]);
    match rng.next_below(18) {
        0..=1 => FileOperation::MakeDirectory(path, draw_mode(rng)),
        2 => {
            let kinds = [
                sys::FileType::Fifo,
                sys::FileType::Socket,
                sys::FileType::RegularFile,
            ];
            FileOperation::MakeNode(path, rng.choose(&kinds), draw_mode(rng))
        }
        3 => FileOperation::MakeSymlink(rng.choose(&LINK_TARGETS), path),
        4 => FileOperation::MakeLink(path, draw_name(rng), rng.next_below(2) == 0),
        5 => FileOperation::Unlink(path),
        6 => FileOperation::RemoveDirectory(path),
        7..=8 => {
            let flags = [
                RenameFlags::empty(),
                RenameFlags::empty(),
                RenameFlags::NOREPLACE,
                RenameFlags::EXCHANGE,
                RenameFlags::EXCHANGE | RenameFlags::NOREPLACE,
            ];
            FileOperation::Rename(path, draw_name(rng), rng.choose(&flags))
        }
        9 => FileOperation::Chmod(path, draw_mode(rng)),
        10 => FileOperation::Chown(path, rng.choose(&[0, 1, 65_534]), rng.choose(&[0, 1, 7])),
        11 => {
            let seconds = rng.choose(&[0, 1, -1, 1_000_000_000, 4_000_000_000, -1_000_000]);
            FileOperation::Touch(path, seconds, rng.next_below(1_000_000_000) as i64)
        }
        12 => {
            let flags = [
                sys::XattrFlags::empty(),
                sys::XattrFlags::CREATE,
                sys::XattrFlags::REPLACE,
            ];
            FileOperation::SetXattr(path, xattr, rng.next_below(200), rng.choose(&flags))
        }
        13 => FileOperation::GetXattr(path, xattr),
        14 => FileOperation::RemoveXattr(path, xattr),
        15 => FileOperation::Stat(path),
        16 => FileOperation::StatOpen(rng.next_below(OPEN_FILES_MAX)),
        _ => match rng.next_below(2) {
            0 => FileOperation::List(path),
            _ => FileOperation::ReadLink(path),
        },
    }
}
