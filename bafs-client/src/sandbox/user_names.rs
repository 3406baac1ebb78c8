//! Names of the job's user and group in the lists of an image, which does not know them: many
//! programs end when their user has no name. Reads and writes no file.

use std::path::Path;

/// What a user and a group are called that the image does not know.
const NAME: &str = "bafs";

/// The list of users with this one in it; nothing when it is there already.
pub(super) fn add_user(text: &str, (uid, gid): (u32, u32), home: &Path) -> Option<String> {
    if has_id(text, uid) {
        return None;
    }
    let home = home.to_str().filter(|home| !home.contains([':', '\n']));
    let name = free_name(text, uid);
    let line = format!("{name}:x:{uid}:{gid}::{}:/bin/sh", home.unwrap_or("/"));
    Some(append_line(text, &line))
}

/// The list of groups with this one in it; nothing when it is there already.
pub(super) fn add_group(text: &str, gid: u32) -> Option<String> {
    if has_id(text, gid) {
        return None;
    }
    let name = free_name(text, gid);
    Some(append_line(text, &format!("{name}:x:{gid}:")))
}

/// Whether a line's third field is this number.
fn has_id(text: &str, id: u32) -> bool {
    let ids = text.lines().filter_map(|line| line.split(':').nth(2));
    ids.filter_map(|field| field.parse::<u32>().ok())
        .any(|found| found == id)
}

fn free_name(text: &str, id: u32) -> String {
    let mut names = text.lines().filter_map(|line| line.split(':').next());
    match names.any(|name| name == NAME) {
        true => format!("{NAME}{id}"),
        false => NAME.to_owned(),
    }
}

fn append_line(text: &str, line: &str) -> String {
    let end = match text.is_empty() || text.ends_with('\n') {
        true => "",
        false => "\n",
    };
    format!("{text}{end}{line}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_users_get_a_name() {
        let users = "root:x:0:0:root:/:/bin/sh";
        let home = Path::new("/home/me");
        assert_eq!(add_user(users, (0, 0), home), None);
        let added = add_user(users, (1000, 100), home).expect("a line more");
        assert_eq!(
            added,
            "root:x:0:0:root:/:/bin/sh\nbafs:x:1000:100::/home/me:/bin/sh\n"
        );
        let other = add_user(&added, (1001, 100), Path::new("/a:b")).expect("a line more");
        assert!(
            other.ends_with("\nbafs1001:x:1001:100::/:/bin/sh\n"),
            "{other}"
        );
        assert_eq!(add_group("", 5), Some("bafs:x:5:\n".to_owned()));
        assert_eq!(add_group("a:x:5:\n", 5), None);
    }
}
