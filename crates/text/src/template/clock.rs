//! Dates for templates: the caller's clock, written as Python's `strftime` does.

const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const SECONDS_A_DAY: i64 = 86_400;

/// A moment in the caller's time zone, in the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DateTime {
    /// Days since 1970-01-01, local.
    day: i64,
    /// Seconds since local midnight.
    second: i64,
}

impl DateTime {
    /// The moment `unix_seconds` after 1970-01-01T00:00Z, where clocks are `utc_offset_seconds` ahead of UTC.
    ///
    /// Moments are kept to the years 1 to 9999, as Python has them.
    pub fn from_unix(unix_seconds: i64, utc_offset_seconds: i32) -> Self {
        const FIRST: i64 = -719_162 * SECONDS_A_DAY;
        const LAST: i64 = 2_932_897 * SECONDS_A_DAY - 1;
        let local = unix_seconds
            .saturating_add(utc_offset_seconds.into())
            .clamp(FIRST, LAST);
        Self {
            day: local.div_euclid(SECONDS_A_DAY),
            second: local.rem_euclid(SECONDS_A_DAY),
        }
    }

    /// Year, month from 1, day from 1 (Howard Hinnant's `civil_from_days`).
    fn date(self) -> (i64, i64, i64) {
        let shifted = self.day + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 {
            month_from_march + 3
        } else {
            month_from_march - 9
        };
        (year_of_era + era * 400 + i64::from(month <= 2), month, day)
    }

    /// Days since the first of January, from 0.
    fn day_of_year(self) -> i64 {
        const BEFORE: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let (year, month, day) = self.date();
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        BEFORE[month as usize - 1] + day - 1 + i64::from(leap && month > 2)
    }

    /// The moment in the given format; codes as in Python's `strftime` under the C locale.
    pub(super) fn strftime(self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        self.write(format, &mut out)?;
        Ok(out)
    }

    fn write(self, format: &str, out: &mut String) -> Result<(), String> {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.second / 3600, self.second / 60 % 60, self.second % 60);
        let hour12 = (hour + 11) % 12 + 1;
        // 1970-01-01 was a Thursday.
        let weekday = (self.day + 3).rem_euclid(7);
        let weekday_from_sunday = (weekday + 1) % 7;
        let (day_name, month_name) = (DAYS[weekday as usize], MONTHS[month as usize - 1]);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.next();
            // GNU's `%-d` writes no padding.
            let unpadded = code == Some('-');
            if unpadded {
                code = chars.next();
            }
            let mut number = |value: i64, width: usize| {
                out.push_str(&format!(
                    "{value:0width$}",
                    width = if unpadded { 0 } else { width }
                ));
            };
            match code {
                Some('Y') => number(year, 4),
                Some('y') => number(year % 100, 2),
                Some('C') => number(year / 100, 2),
                Some('m') => number(month, 2),
                Some('d') => number(day, 2),
                Some('j') => number(self.day_of_year() + 1, 3),
                Some('H') => number(hour, 2),
                Some('I') => number(hour12, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('f') => number(0, 6),
                Some('u') => number(weekday + 1, 1),
                Some('w') => number(weekday_from_sunday, 1),
                Some('U') => number((self.day_of_year() + 7 - weekday_from_sunday) / 7, 2),
                Some('W') => number((self.day_of_year() + 7 - weekday) / 7, 2),
                Some('e') if unpadded => number(day, 0),
                Some('e') => out.push_str(&format!("{day:2}")),
                Some('A') => out.push_str(day_name),
                Some('a') => out.push_str(&day_name[..3]),
                Some('B') => out.push_str(month_name),
                Some('b' | 'h') => out.push_str(&month_name[..3]),
                Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
                Some('c') => self.write("%a %b %e %H:%M:%S %Y", out)?,
                Some('x' | 'D') => self.write("%m/%d/%y", out)?,
                Some('X' | 'T') => self.write("%H:%M:%S", out)?,
                Some('F') => self.write("%Y-%m-%d", out)?,
                Some('R') => self.write("%H:%M", out)?,
                // The moment is naive, as `datetime.now()` is.
                Some('z' | 'Z') => {}
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                Some('%') => out.push('%'),
                other => {
                    let code = other.map(String::from).unwrap_or_default();
                    let problem = format!("strftime_now: unknown format code `%{code}`");
                    return Err(problem);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_dates_as_python_does() {
        // Expected values by CPython 3.11, datetime.fromtimestamp(t, timezone.utc).strftime(f).
        let cases = [
            (1_752_148_800, "%d %B %Y", "10 July 2025"),
            (
                1_752_148_800,
                "%Y-%m-%dT%H:%M:%S %p %I",
                "2025-07-10T12:00:00 PM 12",
            ),
            (
                951_782_400,
                "%F %j %a %A %b %y %e %-d",
                "2000-02-29 060 Tue Tuesday Feb 00 29 29",
            ),
            (-1, "%c", "Wed Dec 31 23:59:59 1969"),
            (1_704_067_199, "%U %W %u %w %j %%", "53 52 7 0 365 %"),
            (
                1_709_251_200,
                "%x %X %-m/%-d %-I%p",
                "03/01/24 00:00:00 3/1 12AM",
            ),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(
                DateTime::from_unix(seconds, 0).strftime(format).unwrap(),
                expected
            );
        }
        assert!(DateTime::from_unix(0, 0).strftime("%Q").is_err());
        assert_eq!(
            DateTime::from_unix(i64::MAX, 0).strftime("%F %T").unwrap(),
            "9999-12-31 23:59:59"
        );
        assert_eq!(
            DateTime::from_unix(i64::MIN, 0).strftime("%F %T").unwrap(),
            "0001-01-01 00:00:00"
        );
    }
}
