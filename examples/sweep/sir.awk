# An epidemic in towns that do not meet: susceptible, infected and recovered (SIR).
#
#     awk -v beta=0.3 -v gamma=0.1 -f sir.awk towns.txt
#
# A line of input is a town and the share that is infected at first. A line of output is
# beta, gamma, town, the share that was ever infected, and the day with most infected.
{
    step = 0.02 # days
    infected = $2
    susceptible = 1 - infected
    peak = peak_day = 0
    for (day = 0; infected > 1e-7; day += step) {
        if (infected > peak) {
            peak = infected
            peak_day = day
        }
        # The midpoint rule.
        new = beta * susceptible * infected
        middle_s = susceptible - new * step / 2
        middle_i = infected + (new - gamma * infected) * step / 2
        new = beta * middle_s * middle_i
        susceptible -= new * step
        infected += (new - gamma * middle_i) * step
    }
    printf "%s,%s,%s,%.6f,%.1f\n", beta, gamma, $1, 1 - susceptible, peak_day
}
