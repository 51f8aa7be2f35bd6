//! Simulated mapped devices that show a loop device, with the rules of the kernel's dm-linear.

use nix::errno::Errno;

use super::machine::Machine;
use super::mapped::{Mapping, Table, number_of};
use crate::host::{LinearTable, MappedDevice};

impl Machine {
    pub(super) fn load_linear(
        &mut self,
        uuid: &str,
        table: &LinearTable,
        read_only: bool,
    ) -> Result<(), Errno> {
        let number = self.mapped(uuid).ok_or(Errno::ENXIO)?;
        let lower = number_of(&table.lower).ok_or(Errno::ENXIO)?;
        let bytes = self.dev(lower)?.bytes;
        if table.targets().is_none() || table.bytes > bytes {
            return Err(Errno::EINVAL);
        }
        if self.is_claimed_beside_tables(lower) {
            return Err(Errno::EBUSY);
        }
        if self.dev(lower)?.read_only && !read_only {
            self.violation(format!("{uuid} is writable above a read-only device"));
        }
        if self.above(lower).any(|other| other != number) {
            self.violation(format!("{uuid} shows a device that another one shows"));
        }
        let bytes = table.bytes;
        let mapping = self.dev_mut(number)?.mapped.as_mut();
        let loaded = Some((Table::Linear { lower, bytes }, read_only));
        mapping.ok_or(Errno::ENXIO)?.loaded = loaded;
        Ok(())
    }

    pub(super) fn linear_device(&self, uuid: &str) -> Option<MappedDevice<LinearTable>> {
        let found = self.mapped_device(self.mapped(uuid)?)?;
        let table = match &found.table {
            Some(Table::Linear { lower, bytes }) => Some(LinearTable {
                lower: self.device(*lower),
                bytes: *bytes,
            }),
            Some(Table::Thin(_)) | None => None,
        };
        Some(found.with_table(table))
    }

    /// The mapped devices that show a device, or will after their next resume.
    pub(super) fn above(&self, lower: u32) -> impl Iterator<Item = u32> {
        let mapped = self.loops.iter();
        let mapped = mapped.filter_map(|(number, dev)| Some((*number, dev.mapped.as_ref()?)));
        let shows = move |(_, mapping): &(u32, &Mapping)| tables_on(mapping, lower) > 0;
        mapped.filter(shows).map(|(number, _)| number)
    }

    /// The tables that keep a device open.
    pub(super) fn tables_above(&self, lower: u32) -> usize {
        let mapped = self.loops.values().filter_map(|dev| dev.mapped.as_ref());
        mapped.map(|mapping| tables_on(mapping, lower)).sum()
    }
}

/// How many of the two tables of a mapped device show a device.
fn tables_on(mapping: &Mapping, number: u32) -> usize {
    let loaded = mapping.loaded.as_ref().map(|(table, _)| table);
    let tables = mapping.table.iter().chain(loaded);
    let shows = |table: &&Table| matches!(table, Table::Linear { lower, .. } if *lower == number);
    tables.filter(shows).count()
}
