//! The rules of thin pools and mapped devices that the driver relies on. A test checks them with the
//! real kernel, and another one with the simulation.

use nix::errno::Errno;
use slackwater::host::{
    Done, Effect, Host, MappedDevice, Result, ThinMessage, ThinSnapshot, ThinTable,
};

const MIB: u64 = 1 << 20;
const ONE: &str = "SLACKWATER-default-one";
const TWO: &str = "SLACKWATER-default-two";

/// A thin pool that no driver and no other program uses.
pub struct Rules<'a> {
    pub host: &'a dyn Host,
    pub pool: &'a str,
    /// Suspends the mapped device with a UUID, as another program does.
    pub suspend_device: &'a dyn Fn(&str),
    /// Suspends the pool, or resumes it.
    pub suspend: &'a dyn Fn(bool),
}

fn errno<T: std::fmt::Debug>(result: Result<T>) -> Option<Errno> {
    result.expect_err("this is refused").code()
}

fn expect<T>(result: Result<T>) -> T {
    result.expect("this is accepted")
}

impl Rules<'_> {
    /// Checks all of them, and leaves the pool with a transaction ID and without devices.
    pub fn check(&self) {
        self.ids();
        self.tables();
        self.snapshots();
        self.removals();
        self.suspended_pool();
        assert!(expect(self.host.thin_devices(self.pool)).is_empty());
    }

    fn perform(&self, effect: &Effect<'_>) -> Result<Done> {
        self.host.perform(effect)
    }

    fn send(&self, message: ThinMessage) -> Result<Done> {
        let pool = self.pool;
        self.perform(&Effect::ThinMessage { pool, message })
    }

    fn snapshot(&self, id: u32, origin: u32) -> Result<Done> {
        let status = expect(self.host.thin_pool(self.pool));
        let snapshot = ThinSnapshot {
            pool: self.pool.into(),
            rdev: status.expect("the pool is active").rdev,
            id,
            origin,
        };
        let prepared = &self.host.prepare_thin_snapshot(snapshot)?;
        self.perform(&Effect::CreateThinSnapshot { prepared })
    }

    fn load(&self, uuid: &str, id: u32, bytes: u64) -> Result<Done> {
        let pool = self.pool.to_string();
        let table = &ThinTable { pool, id, bytes };
        self.perform(&Effect::LoadTable {
            uuid,
            table,
            read_only: false,
        })
    }

    fn activate(&self, uuid: &str, id: u32, bytes: u64) {
        expect(self.perform(&Effect::CreateMapped { uuid }));
        expect(self.load(uuid, id, bytes));
        expect(self.perform(&Effect::ResumeMapped { uuid }));
    }

    fn find(&self, uuid: &str) -> Option<MappedDevice> {
        let found = expect(self.host.mapped_devices(self.pool, "SLACKWATER-"));
        found.into_iter().find(|device| device.uuid == uuid)
    }

    fn found(&self, uuid: &str) -> MappedDevice {
        self.find(uuid).expect("the device is there")
    }

    fn transaction_id(&self) -> u64 {
        let status = expect(self.host.thin_pool(self.pool));
        status.expect("the pool is active").transaction_id
    }

    fn ids(&self) {
        expect(self.send(ThinMessage::CreateThin { id: 7 }));
        let again = self.send(ThinMessage::CreateThin { id: 7 });
        assert_eq!(errno(again), Some(Errno::EEXIST));
        assert_eq!(errno(self.snapshot(8, 9)), Some(Errno::ENODATA));
        let absent = self.send(ThinMessage::Delete { id: 9 });
        assert_eq!(errno(absent), Some(Errno::ENODATA));
        let from = self.transaction_id();
        let claim = ThinMessage::SetTransactionId {
            from,
            to: from + (1 << 40),
        };
        expect(self.send(claim));
        assert_eq!(errno(self.send(claim)), Some(Errno::EINVAL));
        assert_eq!(self.transaction_id(), from + (1 << 40));
        expect(self.send(ThinMessage::Delete { id: 7 }));
    }

    fn tables(&self) {
        expect(self.send(ThinMessage::CreateThin { id: 1 }));
        expect(self.perform(&Effect::CreateMapped { uuid: ONE }));
        let again = self.perform(&Effect::CreateMapped { uuid: ONE });
        assert_eq!(errno(again), Some(Errno::EBUSY));
        assert!(self.found(ONE).table.is_none());
        assert!(expect(self.host.hold_mapped(ONE)).is_none(), "no table");
        assert_eq!(errno(self.load(ONE, 3, MIB)), Some(Errno::ENODATA));
        expect(self.load(ONE, 1, 32 * MIB));
        expect(self.perform(&Effect::ResumeMapped { uuid: ONE }));
        let busy = self.send(ThinMessage::Delete { id: 1 });
        assert_eq!(errno(busy), Some(Errno::EBUSY));
        let device = self.found(ONE).device;
        assert_eq!(expect(self.host.device_bytes(&device)), 32 * MIB);

        // A table takes effect with a resume, and is dropped by a clear.
        expect(self.load(ONE, 1, 96 * MIB));
        assert!(self.found(ONE).has_inactive_table);
        assert_eq!(expect(self.host.device_bytes(&device)), 32 * MIB);
        expect(self.perform(&Effect::ClearTable { uuid: ONE }));
        assert!(!self.found(ONE).has_inactive_table);
        expect(self.load(ONE, 1, 64 * MIB));
        expect(self.perform(&Effect::ResumeMapped { uuid: ONE }));
        assert_eq!(expect(self.host.device_bytes(&device)), 64 * MIB);
        assert!(!self.found(ONE).has_inactive_table);
    }

    fn snapshots(&self) {
        (self.suspend_device)(ONE);
        assert!(self.found(ONE).suspended);
        expect(self.snapshot(2, 1));
        assert_eq!(errno(self.snapshot(2, 1)), Some(Errno::EEXIST));
        expect(self.perform(&Effect::ResumeMapped { uuid: ONE }));
        assert!(!self.found(ONE).suspended);
        // The snapshot is not active, so nothing is suspended for one of it.
        expect(self.snapshot(3, 2));
        self.activate(TWO, 2, 64 * MIB);
        let ids: Vec<u32> = expect(self.host.thin_devices(self.pool))
            .into_keys()
            .collect();
        assert_eq!(ids, [1, 2, 3]);
    }

    fn removals(&self) {
        let claimed = expect(self.host.claim_mapped(TWO));
        assert_eq!(errno(self.host.claim_mapped(TWO)), Some(Errno::EBUSY));
        // It exists until it is closed.
        expect(self.perform(&Effect::RemoveMapped { uuid: TWO }));
        assert!(self.found(TWO).deferred_remove);
        drop(claimed);
        super::eventually("a closed device goes", || self.find(TWO).is_none());
        for _ in 0..2 {
            expect(self.perform(&Effect::RemoveMapped { uuid: ONE }));
            super::eventually("a removed device goes", || self.find(ONE).is_none());
        }
        for id in [1, 2, 3] {
            expect(self.send(ThinMessage::Delete { id }));
        }
    }

    fn suspended_pool(&self) {
        expect(self.send(ThinMessage::CreateThin { id: 1 }));
        expect(self.perform(&Effect::CreateMapped { uuid: ONE }));
        (self.suspend)(true);
        let create = ThinMessage::CreateThin { id: 2 };
        assert_eq!(errno(self.load(ONE, 1, 32 * MIB)), Some(Errno::EAGAIN));
        assert_eq!(errno(self.send(create)), Some(Errno::EAGAIN));
        assert!(expect(self.host.thin_pool(self.pool)).is_some());
        (self.suspend)(false);
        expect(self.load(ONE, 1, 32 * MIB));
        expect(self.send(create));
        expect(self.perform(&Effect::RemoveMapped { uuid: ONE }));
        super::eventually("a removed device goes", || self.find(ONE).is_none());
        for id in [1, 2] {
            expect(self.send(ThinMessage::Delete { id }));
        }
    }
}
