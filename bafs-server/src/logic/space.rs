//! The ledger of reserved space: what is promised never exceeds the capacity. Measures nothing.

/// An amount of space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Bytes.
    pub bytes: u64,
    /// Files and directories.
    pub files: u64,
}

impl Amount {
    /// Both together.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
        }
    }

    /// What it is more than another, of each kind.
    #[must_use]
    pub fn excess_over(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            files: self.files.saturating_sub(other.files),
        }
    }
}

/// There is too little space; the amount says how much is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceShortage {
    /// Too few bytes: so many are free.
    Bytes(u64),
    /// Too few files: so many are free.
    Files(u64),
}

/// Capacity and what is promised of it.
#[derive(Debug, Clone, Copy)]
pub struct SpaceLedger {
    capacity: Amount,
    reserved: Amount,
}

impl SpaceLedger {
    /// A ledger over `capacity` with nothing promised.
    pub fn new(capacity: Amount) -> Self {
        Self {
            capacity,
            reserved: Amount::default(),
        }
    }

    /// What may be promised at most.
    pub fn capacity(&self) -> Amount {
        self.capacity
    }

    /// What is not promised. Zero when more is promised than there is, which only a capacity that
    /// was made smaller can cause.
    pub fn free(&self) -> Amount {
        Amount {
            bytes: self.capacity.bytes.saturating_sub(self.reserved.bytes),
            files: self.capacity.files.saturating_sub(self.reserved.files),
        }
    }

    /// Promises `amount`, all or nothing.
    ///
    /// # Errors
    /// [`SpaceShortage`] with the free amount; nothing is promised then.
    pub fn reserve(&mut self, amount: Amount) -> Result<(), SpaceShortage> {
        let free = self.free();
        if amount.bytes > free.bytes {
            return Err(SpaceShortage::Bytes(free.bytes));
        }
        if amount.files > free.files {
            return Err(SpaceShortage::Files(free.files));
        }
        self.restore_reservation(amount);
        assert!(self.reserved.bytes <= self.capacity.bytes);
        assert!(self.reserved.files <= self.capacity.files);
        Ok(())
    }

    /// Counts a promise of an earlier life of the server, whatever the capacity is now: a volume
    /// that exists is kept even when the capacity was made smaller.
    pub fn restore_reservation(&mut self, amount: Amount) {
        self.reserved.bytes = self.reserved.bytes.saturating_add(amount.bytes);
        self.reserved.files = self.reserved.files.saturating_add(amount.files);
    }

    /// Takes a promise back. It must have been given.
    pub fn release(&mut self, amount: Amount) {
        assert!(self.reserved.bytes >= amount.bytes && self.reserved.files >= amount.files);
        self.reserved.bytes -= amount.bytes;
        self.reserved.files -= amount.files;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn amount(bytes: u64, files: u64) -> Amount {
        Amount { bytes, files }
    }

    #[test]
    fn refusals_say_how_much_is_free() {
        let mut space = SpaceLedger::new(amount(100, 10));
        assert_eq!(space.reserve(amount(60, 2)), Ok(()));
        assert_eq!(space.reserve(amount(41, 1)), Err(SpaceShortage::Bytes(40)));
        assert_eq!(space.reserve(amount(40, 9)), Err(SpaceShortage::Files(8)));
        assert_eq!(
            space.reserve(amount(u64::MAX, 1)),
            Err(SpaceShortage::Bytes(40))
        );
        assert_eq!(space.reserve(amount(40, 8)), Ok(()));
        space.release(amount(60, 2));
        assert_eq!(space.free(), amount(60, 2));
    }

    #[test]
    fn a_shrunk_capacity_refuses_but_keeps_reservations() {
        let mut space = SpaceLedger::new(amount(10, 1));
        space.restore_reservation(amount(25, 3));
        assert_eq!(space.free(), amount(0, 0));
        assert_eq!(space.reserve(amount(1, 0)), Err(SpaceShortage::Bytes(0)));
        space.release(amount(25, 3));
        assert_eq!(space.free(), amount(10, 1));
    }

    proptest! {
        #[test]
        fn reservations_never_exceed_the_capacity(steps in prop::collection::vec(
            (any::<bool>(), 0u64..60, 0u64..6), 0..200,
        )) {
            let mut space = SpaceLedger::new(amount(100, 10));
            let mut given = Vec::new();
            for (take, bytes, files) in steps {
                if take {
                    if space.reserve(amount(bytes, files)).is_ok() {
                        given.push(amount(bytes, files));
                    }
                } else if let Some(last) = given.pop() {
                    space.release(last);
                }
                let total = given.iter().fold((0, 0), |t, a| (t.0 + a.bytes, t.1 + a.files));
                prop_assert!(total.0 <= 100 && total.1 <= 10);
                prop_assert_eq!(space.free(), amount(100 - total.0, 10 - total.1));
            }
        }
    }
}
