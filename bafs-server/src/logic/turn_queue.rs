//! Whose transfer is next when several users wait for one link: each user gets the same bytes while
//! it waits, however many transfers it has (start-time fair queuing; P. Goyal, H. Vin, H. Cheng,
//! SIGCOMM 1996). Reads no clock.

use std::collections::{BTreeMap, VecDeque};

/// A transfer that waits, or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TurnTicket(u64);

/// Transfers by user.
#[derive(Debug)]
pub(crate) struct TurnQueue {
    places_free: usize,
    next_ticket: u64,
    /// Where the transfer began that began last, in bytes that each user was given.
    position: u64,
    /// Where the last transfer of a user ends, if that is behind the position.
    ends: BTreeMap<String, u64>,
    waiting: BTreeMap<String, VecDeque<(TurnTicket, u64)>>,
}

impl TurnQueue {
    /// A queue for so many transfers at once.
    pub(crate) fn new(places: usize) -> Self {
        Self {
            places_free: places,
            next_ticket: 0,
            position: 0,
            ends: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// A transfer of a user waits from now on.
    pub(crate) fn enter(&mut self, user: &str, bytes: u64) -> TurnTicket {
        let ticket = TurnTicket(self.next_ticket);
        self.next_ticket += 1;
        let own = self.waiting.entry(user.to_owned()).or_default();
        own.push_back((ticket, bytes));
        ticket
    }

    /// The transfer that may go on now, if there is a place and somebody waits.
    pub(crate) fn take_next(&mut self) -> Option<TurnTicket> {
        if self.places_free == 0 {
            return None;
        }
        let start = |user: &String| {
            let end = self.ends.get(user).copied().unwrap_or(0);
            end.max(self.position)
        };
        let firsts = self.waiting.iter().filter_map(|(user, own)| {
            let (ticket, bytes) = own.front()?;
            Some((start(user), *ticket, user.clone(), *bytes))
        });
        let (start, ticket, user, bytes) = firsts.min()?;
        self.drop_waiting(&user, ticket);
        self.places_free -= 1;
        self.position = start;
        self.ends.insert(user, start.saturating_add(bytes));
        // Who did not wait has no claim on what it left to others.
        self.ends.retain(|_, end| *end > start);
        Some(ticket)
    }

    /// A transfer ends, or nobody waits for it any more.
    pub(crate) fn leave(&mut self, ticket: TurnTicket) {
        let is_waiting = |own: &VecDeque<(TurnTicket, u64)>| own.iter().any(|it| it.0 == ticket);
        let user = self.waiting.iter().find(|(_, own)| is_waiting(own));
        match user.map(|(user, _)| user.clone()) {
            Some(user) => self.drop_waiting(&user, ticket),
            None => self.places_free += 1,
        }
    }

    fn drop_waiting(&mut self, user: &str, ticket: TurnTicket) {
        if let Some(own) = self.waiting.get_mut(user) {
            own.retain(|it| it.0 != ticket);
            if own.is_empty() {
                self.waiting.remove(user);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// What each user gets of some transfers; each has always so many of a size that wait.
    fn count_bytes(users: &[(&str, usize, u64)], transfers: usize) -> Vec<u64> {
        let mut queue = TurnQueue::new(2);
        let mut owners = BTreeMap::new();
        for (user, (name, depth, bytes)) in users.iter().enumerate() {
            for _ in 0..*depth {
                owners.insert(queue.enter(name, *bytes), user);
            }
        }
        let mut given = vec![0; users.len()];
        let mut going = VecDeque::new();
        for _ in 0..transfers {
            while let Some(ticket) = queue.take_next() {
                going.push_back(ticket);
            }
            assert_eq!(going.len(), 2, "no place is idle");
            let ended = going.pop_front().expect("it goes on");
            queue.leave(ended);
            let user = owners[&ended];
            let (name, _, bytes) = users[user];
            given[user] += bytes;
            owners.insert(queue.enter(name, bytes), user);
        }
        given
    }

    #[test]
    fn users_share_alike_however_much_they_ask() {
        for users in [
            &[("alice", 40, MIB), ("bob", 2, MIB)][..],
            &[("alice", 40, MIB), ("bob", 4, MIB / 4), ("carol", 3, MIB)],
        ] {
            let given = count_bytes(users, 600);
            let least = given.iter().min().expect("some");
            let most = given.iter().max().expect("some");
            assert!(*least > 90 * MIB && most - least <= 3 * MIB, "{given:?}");
        }
        assert_eq!(count_bytes(&[("alice", 9, MIB)], 50), [50 * MIB]);
    }

    #[test]
    fn idle_user_saves_nothing_up() {
        let mut queue = TurnQueue::new(1);
        for _ in 0..50 {
            let ticket = queue.enter("alice", MIB);
            assert_eq!(queue.take_next(), Some(ticket));
            queue.leave(ticket);
        }
        let waiting: Vec<_> = ["alice", "bob", "bob", "alice"]
            .map(|user| queue.enter(user, MIB))
            .into();
        let mut order = Vec::new();
        while let Some(ticket) = queue.take_next() {
            order.push(waiting.iter().position(|it| *it == ticket).expect("it"));
            queue.leave(ticket);
        }
        assert_eq!(order, [1, 0, 2, 3]);
    }

    #[test]
    fn abandoned_transfer_gives_its_place_to_the_next() {
        let mut queue = TurnQueue::new(1);
        let tickets = [0, 1, 2].map(|_| queue.enter("alice", MIB));
        assert_eq!(queue.take_next(), Some(tickets[0]));
        queue.leave(tickets[1]);
        assert_eq!(queue.take_next(), None, "there is one place");
        queue.leave(tickets[0]);
        assert_eq!(queue.take_next(), Some(tickets[2]));
        queue.leave(tickets[2]);
        assert!(queue.waiting.is_empty() && queue.places_free == 1);
    }
}
