"""The small vocabulary that every generator draws from; few words, so that each is one token."""

ADJECTIVES = tuple(
    """
    amber ancient azure bitter black blue brave bright broken bronze calm clear cold copper coral crimson dark deep
    distant dusty early eager empty fading famous frozen gentle golden grand gray green hidden hollow iron ivory
    jade late little lonely long lost marble merry misty narrow noble northern old olive orange pale patient plain
    proud purple quiet rapid red royal rusty sacred salty scarlet silent silver simple slow small smooth southern
    stony sunny swift tall tiny velvet violet warm western white wide wild wise yellow young
    """.split()
)

NOUNS = tuple(
    """
    abbey anchor arch barn basin bay beacon bell bridge brook cabin camp canal canyon castle cave cellar chapel
    citadel cliff coast cottage creek crown desert dome farm ferry field forest fort fountain garden gate glacier
    grove hall harbor hill hotel house island lake lantern library lighthouse market meadow mill mine mountain
    museum oasis orchard palace park pier plaza pond port quarry ranch reef ridge river road school shore spring
    square stable station temple theater tower town tunnel valley village vineyard wall well wharf windmill workshop
    yard
    """.split()
)

NAMES = tuple(
    """
    Ada Adam Alice Anna Arthur Ben Boris Carl Carol Clara Daniel David Diana Edgar Ella Emma Eric Eva Felix Fiona
    Frank George Grace Hanna Harry Helen Henry Hugo Ida Ines Ivan Jack Jane Jason Julia Karen Karl Kate Laura Leo
    Lily Linda Louis Lucy Maria Mark Martha Mary Max Mona Nadia Nina Noah Nora Olga Oscar Otto Paul Peter Petra
    Ralph Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Thomas Tina Victor Vera Walter Wanda Yara Zoe
    """.split()
)

ITEMS = tuple(
    """
    apple arrow bag ball basket bean bird board boat bone book boot bottle bowl box bread brick broom brush bucket
    button cake candle cap card carrot chain chair cheese clay clock cloth coat coin comb cord corn cup curtain desk
    dish doll door drum egg feather fence flag flower flute fork glass glove grape hammer hat honey hook horn ink
    jar jewel jug kettle key kite knife ladder lamp leaf lemon letter lock map mask melon milk mirror nail needle
    nest net nut oil onion paint pan paper peach pear pearl pen pepper pillow pin pipe plate plum pot purse ribbon
    rice ring rope rug sack salt saw scarf seed shell shirt shoe soap sock spade spoon stamp stick stone stool sugar
    table tea tent thread ticket tile towel toy tray tub vase wheel whistle wire wood wool
    """.split()
)
