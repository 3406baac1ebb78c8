//! Finds the known name that the user probably meant. It knows nothing of jobs or keys.

/// The candidate with the fewest slips of the pen (insert, delete, replace, swap) from `word`;
/// none when even that one is too different. Case does not count.
#[must_use]
pub fn find_nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word: Vec<char> = word.to_lowercase().chars().collect();
    // None in a letter, one in a short name, up to three in a long one: more would be guessing.
    let mut slips_max = if word.len() < 2 {
        0
    } else {
        (word.len() / 3).clamp(1, 3)
    };
    let mut best: Option<&str> = None;
    for candidate in candidates {
        let letters: Vec<char> = candidate.to_lowercase().chars().collect();
        if letters.len().abs_diff(word.len()) > slips_max {
            continue;
        }
        let slips = edit_distance(&word, &letters);
        // Of equals the first by alphabet, so that the order of candidates does not matter.
        if slips < slips_max || (slips == slips_max && best.is_none_or(|b| candidate < b)) {
            slips_max = slips;
            best = Some(candidate);
        }
    }
    best
}

/// The optimal string alignment distance.
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replaced = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replaced.min(last[j] + 1).min(row[j - 1] + 1);
            let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if swapped {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_corrects_slips_but_not_strangers() {
        let names = ["job", "volume", "extract", "mount"];
        assert_eq!(find_nearest("jbo", names), Some("job"));
        assert_eq!(find_nearest("volumes", names), Some("volume"));
        assert_eq!(find_nearest("MOUNT", names), Some("mount"));
        assert_eq!(find_nearest("extrakt", names), Some("extract"));
        assert_eq!(find_nearest("scratch", names), None);
        assert_eq!(find_nearest("", [""]), Some(""));
        assert_eq!(find_nearest("x", ["y"]), None);
    }

    #[test]
    fn alphabetical_order_breaks_ties_between_names() {
        assert_eq!(find_nearest("p9", ["p2", "p1", "p3"]), Some("p1"));
    }
}
